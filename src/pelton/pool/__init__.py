"""Which models are loaded. What dialects and the library know of everything below is here."""

from __future__ import annotations

from pelton.hub.modelfile import parameter_lines
from pelton.hub.modelfile import write as write_modelfile
from pelton.hub.preset import Preset, PresetMessage, jinja
from pelton.hub.source import Progress
from pelton.pool.cards import Loading, Memory, ModelCard, Report, Resident, StoredModel
from pelton.pool.models_file import read as read_models_file
from pelton.pool.pool import Pool
from pelton.pool.space import OVERHEAD
from pelton.pool.spec import ModelSpec

__all__ = [
    "OVERHEAD",
    "Loading",
    "Memory",
    "ModelCard",
    "ModelSpec",
    "Pool",
    "Preset",
    "PresetMessage",
    "Progress",
    "Report",
    "Resident",
    "StoredModel",
    "jinja",
    "parameter_lines",
    "read_models_file",
    "write_modelfile",
]
