"""What OpenAI's clients say beside a prompt: how soon they want its answer, for whom it is, and notes of their own."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pelton.errors import InvalidRequest
from pelton.server.openai_types import ServiceTier

FLEX, PRIORITY = 100, -100
"""Priorities of the tiers; of `default` it is 0."""
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Of metadata: entries, and characters of each."""


class Account(Protocol):
    """The fields of a request that are read here."""

    @property
    def service_tier(self) -> ServiceTier | None:
        """How soon."""
        ...

    @property
    def priority(self) -> int | None:
        """How soon, as a number."""
        ...

    @property
    def metadata(self) -> dict[str, str] | None:
        """Notes."""
        ...

    @property
    def user(self) -> str | None:
        """For whom."""
        ...

    @property
    def safety_identifier(self) -> str | None:
        """For whom, as OpenAI calls it now."""
        ...


class Tier(NamedTuple):
    """How a request is served."""

    name: str
    """As the answer says it."""
    priority: int


def tier_of(body: Account) -> Tier:
    """`flex` waits for all others, `priority` and `fast` go first; the tiers of contracts are served as `default`.
    Raises `InvalidRequest` for a tier beside another priority."""
    asked = body.service_tier
    if asked not in ("flex", "priority", "fast"):
        return Tier("default", body.priority or 0)
    if body.priority:
        raise InvalidRequest(f"service_tier {asked} and priority exclude each other", param="service_tier")
    return Tier("flex", FLEX) if asked == "flex" else Tier("priority", PRIORITY)


def is_other_tier(body: Account) -> bool:
    """Does it ask for a tier that there is not here?"""
    return body.service_tier in ("scale", "ultrafast")


def user_of(body: Account) -> str | None:
    """For whom it is."""
    return body.user or body.safety_identifier


def check_metadata(given: dict[str, str] | None) -> None:
    """Raise `InvalidRequest` for more, or longer, than there may be."""
    if given is None:
        return
    if len(given) > MAX_PAIRS:
        raise InvalidRequest(f"metadata has {len(given)} pairs, over {MAX_PAIRS}", param="metadata")
    for key, value in given.items():
        if not 1 <= len(key) <= MAX_KEY:
            message = f"metadata: the key {key[:80]!r} has {len(key)} characters, must have 1 to {MAX_KEY}"
            raise InvalidRequest(message, param="metadata")
        if len(value) > MAX_VALUE:
            message = f"metadata: the value of {key!r} has {len(value)} characters, over {MAX_VALUE}"
            raise InvalidRequest(message, param="metadata")
