"""What happens to blocks of KV memory before a step: copies, and ways out to host memory and back. Decided by policy,
made by the runner, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Copy(NamedTuple):
    """Copy the first `num_tokens` slots of block `src` to block `dst` of a cache group."""

    group: int
    src: int
    dst: int
    num_tokens: int


@dataclass
class Saved:
    """What a preempted sequence had in KV memory, in host memory."""

    num_computed: int
    """Tokens of the sequence whose keys and values it holds."""
    num_bytes: int
    data: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """The backend's bytes by (cache group, place in the table), there once the `Save`s are made."""


class Save(NamedTuple):
    """Read a block of a cache group into `saved`, where it is block `place` of its sequence."""

    group: int
    block: int
    place: int
    saved: Saved


class Restore(NamedTuple):
    """Write block `place` of `saved` to a block of a cache group."""

    group: int
    block: int
    place: int
    saved: Saved


Move = Copy | Save | Restore
