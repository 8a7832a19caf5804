"""Calls of code that is not ours, which may take long or never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class TookTooLong(Exception):
    """A call has not returned in time; nobody waits for it any more."""


class TimeLimited:
    """A thread that makes calls for others, one after another, and is waited for no longer than `seconds` each; 0:
    for as long as it takes. A call cannot be ended from outside: while one is late, the next ones are refused."""

    def __init__(self, name: str, seconds: float) -> None:
        self._seconds = seconds
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._last: Future[Any] = Future()
        self._last.set_result(None)
        threading.Thread(target=self._work, name=name, daemon=True).start()  # which no exit waits for

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """What the function gives or raises. Raises `TookTooLong`."""
        if not self._last.done():
            raise TookTooLong("it has not returned from an earlier call")
        self._last = future = Future[Any]()
        self._jobs.put((future, function, args))
        if wait((future,), self._seconds or None).not_done:
            raise TookTooLong(f"it took longer than {self._seconds:g} s (processor_timeout)")
        result: T = future.result()
        return result

    def close(self) -> None:
        """Have the thread end after the call that it makes."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, args = job
            try:
                future.set_result(function(*args))
            except BaseException as error:  # also SystemExit: the caller's matter, not the thread's
                future.set_exception(error)
            del job, future, function, args  # nothing of a call outlives it here
