"""An event loop whose time passes only while all tasks wait, and then at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits, and nothing will ever happen")
        self.now += timeout
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._simulated = _Selector()
        super().__init__(self._simulated)

    def time(self) -> float:
        return self._simulated.now


def simulate(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end. Raises `RuntimeError` where it waits for what never comes. Threads must not be used."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(work)
