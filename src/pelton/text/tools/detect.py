"""Which dialect a model calls tools in: by what its chat template writes."""

from __future__ import annotations

from pelton.text.tools.dialect import Dialect
from pelton.text.tools.hermes import Hermes


def dialect_of(template: str) -> Dialect:
    """The dialect of a model with that chat template."""
    return Hermes()
