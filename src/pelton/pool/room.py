"""Pure policy: is there room for one more model, and which ones leave for it. No tensors, no clock, no tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pelton.errors import InsufficientMemory


@dataclass(frozen=True)
class Held:
    """A model that takes memory. `used_at`: by anybody but at idle priority. `can_leave`: may it
    be unloaded for another one, once its requests have ended?"""

    name: str
    memory: int
    is_idle: bool
    used_at: float
    can_leave: bool = True
    is_leaving: bool = False
    """Does it leave already, once its requests have ended?"""


@dataclass(frozen=True)
class Room:
    """There is room, of so many bytes."""

    memory: int


@dataclass(frozen=True)
class Leave:
    """There is room when these have been unloaded."""

    names: tuple[str, ...]


def make_room(
    name: str, least: int, usual: int, held: Sequence[Held], *, available: int, max_models: int = 0
) -> Room | Leave:
    """What must happen before a model can be loaded beside those that are `held`, with `available` bytes left. It needs
    `least` bytes, and `usual` ones for a context of the usual length.

    Those that leave already are reckoned with first, idle ones leave before busy ones, and of those the one that was
    not used for longest first; none leaves that need not. A model gets the usual where all that may leave makes room
    for it, and what is there where that is enough. Raises `InsufficientMemory` with the numbers where it is not.
    """
    leaving = sorted((each for each in held if each.can_leave), key=_leaves_after)
    most = available + sum(each.memory for each in leaving)
    too_many = max(0, len(held) + 1 - max_models) if max_models else 0
    if most < least or too_many > len(leaving):
        raise InsufficientMemory(_refusal(name, least, held, available, most, too_many))
    target = min(usual, most)
    if available >= target and not too_many:
        return Room(available)

    def is_enough(chosen: Sequence[Held]) -> bool:
        return len(chosen) >= too_many and available + sum(each.memory for each in chosen) >= target

    chosen: list[Held] = []
    for each in leaving:
        if is_enough(chosen):
            break
        chosen.append(each)
    for each in reversed(chosen[:-1]):  # small ones that a later, bigger one makes needless
        if is_enough(rest := [other for other in chosen if other is not each]):
            chosen = rest
    return Leave(tuple(each.name for each in chosen))


def _leaves_after(held: Held) -> tuple[bool, bool, float]:
    """The order in which models leave."""
    return not held.is_leaving, not held.is_idle, held.used_at


def _refusal(name: str, least: int, held: Sequence[Held], available: int, most: int, too_many: int) -> str:
    others = [each for each in held if not each.can_leave]  # not by their names: not every client may know those
    beside = f"; {len(others)} that stay beside it have {_mib(sum(each.memory for each in others))}" if others else ""
    if most < least:
        return (
            f"the model {name} needs at least {_mib(least)}, but only {_mib(most)} of memory can be had "
            f"({_mib(available)} are left now){beside}"
        )
    return f"the model {name} would be one more than may be loaded at once{beside}"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
