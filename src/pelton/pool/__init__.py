"""Which models are loaded. What dialects and the library know of everything below is here."""

from __future__ import annotations

from pelton.hub.source import Progress
from pelton.pool.cards import Loading, ModelCard, Report, Resident, StoredModel
from pelton.pool.pool import Pool
from pelton.pool.spec import ModelSpec

__all__ = ["Loading", "ModelCard", "ModelSpec", "Pool", "Progress", "Report", "Resident", "StoredModel"]
