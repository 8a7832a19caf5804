"""Pelton: one engine for large language models, from a laptop to a cluster."""

from __future__ import annotations

__version__ = "0.1.0"
