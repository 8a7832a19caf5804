"""What a pull, a load and a batch report, shown on standard error so that answers on standard output stay clean."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from pelton.pool import Loading
from pelton.pool import Progress as Pull

if TYPE_CHECKING:
    from pelton.progress.bars import Bars

PATIENCE = 0.7
"""Seconds that a load may take before it is worth a bar (whose library takes as long to import as a small model)."""


class Display:
    """Draws bars once there is something to wait for, if `is_shown`. May be called from any thread."""

    def __init__(self, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._bars: Bars | None = None
        self._lock = threading.Lock()
        self._load_began: float | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            if self._bars is not None:
                self._bars.close()

    def __call__(self, event: Pull | Loading) -> None:
        """Show one step."""
        with self._lock:
            if self._is_shown and (self._bars is not None or self._is_worth_a_bar(event)):
                self._drawn().show(event)

    def counter(self, total: int) -> Callable[[int], None]:
        """Begin a batch of that many prompts. What is given back counts one answer of so many tokens."""
        began = time.monotonic()
        done = num_tokens = 0

        def count(count: int) -> None:
            nonlocal done, num_tokens
            with self._lock:
                done, num_tokens = done + 1, num_tokens + count
                if self._is_shown:
                    self._drawn().show_batch(done, total, num_tokens / max(time.monotonic() - began, 1e-9))

        return count

    def _drawn(self) -> Bars:
        if self._bars is None:
            from pelton.progress.bars import Bars

            self._bars = Bars()
        return self._bars

    def _is_worth_a_bar(self, event: Pull | Loading) -> bool:
        if not isinstance(event, Loading):
            return True
        now = time.monotonic()
        self._load_began = self._load_began or now
        return now - self._load_began > PATIENCE and event.share < 1
