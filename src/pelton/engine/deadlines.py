"""How long requests may wait and run. Holds ids, not requests: one that has ended is not kept alive by its deadline."""

from __future__ import annotations

import heapq
import math

from pelton.engine.sequence import SequenceGroup
from pelton.errors import PeltonError, QueueTimeout, TimedOut

SLACK = 256
"""Deadlines of requests that have ended are dropped before their time where there are more of them than this, and than
of requests in flight."""


class Deadlines:
    """The limits of the requests in flight, on one clock in seconds. The arguments are the limits of requests that
    come without; 0: none."""

    def __init__(self, queue_timeout: float, request_timeout: float) -> None:
        self._queue_timeout = queue_timeout
        self._request_timeout = request_timeout
        self._heap: list[tuple[float, int, str, bool]] = []
        """(when, arrival, request id, is it the limit of waiting?), the next one first."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, group: SequenceGroup, now: float) -> None:
        """A request has come."""
        request = group.request
        for given, default, is_queue in (
            (request.queue_timeout, self._queue_timeout, True),
            (request.timeout, self._request_timeout, False),
        ):
            if seconds := default if given is None else given:
                heapq.heappush(self._heap, (now + seconds, group.arrival, request.id, is_queue))

    @property
    def next(self) -> float:
        """When there is a limit to look at."""
        return self._heap[0][0] if self._heap else math.inf

    def expired(self, groups: dict[str, SequenceGroup], now: float) -> list[tuple[SequenceGroup, PeltonError]]:
        """Those of the requests in flight (by id) that must end now, and why."""
        ended: list[tuple[SequenceGroup, PeltonError]] = []
        if len(self._heap) > 4 * len(groups) + SLACK:
            self._heap = [each for each in self._heap if _is_open(each[2], each[1], groups)]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][0] <= now:
            _, arrival, id, is_queue = heapq.heappop(self._heap)
            if not _is_open(id, arrival, groups) or any(groups[id] is other for other, _ in ended):
                continue
            group = groups[id]
            if not is_queue:
                ended.append((group, TimedOut("the request has taken as long as it may (timeout)", param="timeout")))
            elif not group.has_started:
                message = "the request has waited as long as it may (queue_timeout); try again later"
                ended.append((group, QueueTimeout(message, param="queue_timeout")))
        return ended


def _is_open(id: str, arrival: int, groups: dict[str, SequenceGroup]) -> bool:
    """Is that request still in flight? Another one may have its id now."""
    return id in groups and groups[id].arrival == arrival
