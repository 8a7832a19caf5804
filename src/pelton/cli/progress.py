"""What a pull and a load report, shown on standard error so that answers on standard output stay clean."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from pelton.pool import Loading
from pelton.pool import Progress as Pull

if TYPE_CHECKING:
    from pelton.cli.bars import Bars

PATIENCE = 0.7
"""Seconds that a load may take before it is worth a bar (whose library takes as long to import as a small model)."""


class Display:
    """Draws bars once there is something to wait for. May be called from any thread."""

    def __init__(self) -> None:
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
            if self._bars is None and not self._is_worth_a_bar(event):
                return
            if self._bars is None:
                from pelton.cli.bars import Bars

                self._bars = Bars()
            self._bars.show(event)

    def _is_worth_a_bar(self, event: Pull | Loading) -> bool:
        if not isinstance(event, Loading):
            return True
        now = time.monotonic()
        self._load_began = self._load_began or now
        return now - self._load_began > PATIENCE and event.share < 1
