"""Who has had how much: virtual token counters, one per tenant, from which the next one to be served is chosen.

Source: "Fairness in Serving Large Language Models" (Sheng and others, OSDI 2024). A tenant is charged for the prompt
tokens that were computed for it and, doubly, for the tokens that it was given: `OUTPUT` is what a drawn token costs
beside one of a prompt. The tenant with the least counter is next. One that comes back from a pause is lifted to the
least counter of those that wait, so that a pause saves nothing up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

OUTPUT = 2
KEPT = 1024
"""Counters of tenants without waiting requests that are kept at least, the greatest first."""


class Shares:
    """The counters, in tokens."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._floor = 0
        """The counter of the tenant that was served last, as it was chosen."""

    def __len__(self) -> int:
        return len(self._counters)

    def of(self, tenant: str) -> int:
        """What a tenant has had."""
        return self._counters.get(tenant, 0)

    def charge(self, tenant: str, tokens: int) -> None:
        """It was given so much more."""
        self._counters[tenant] = self._counters.get(tenant, 0) + tokens

    def enter(self, tenant: str, beside: Iterable[str]) -> None:
        """A tenant without waiting requests gets one, beside those tenants that wait."""
        floor = min(map(self.of, beside), default=self._floor)
        self._counters[tenant] = max(self.of(tenant), floor)

    def least(self, tenants: Iterable[str]) -> str:
        """The one of these that has had least; the first of those that are equal."""
        return min(tenants, key=self.of)

    def choose(self, tenant: str, waiting: Iterable[str]) -> None:
        """A tenant is served now."""
        self._floor = max(self._floor, self.of(tenant))
        if len(self._counters) > 2 * KEPT:
            kept = {*heapq.nlargest(KEPT, self._counters, key=self.of), *waiting}
            self._counters = {name: count for name, count in self._counters.items() if name in kept}
