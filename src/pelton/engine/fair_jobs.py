"""Jobs of many tenants for one thread: none waits for all that another has asked for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Job:
    tenant: str
    size: int
    run: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class FairJobs:
    """One job runs at a time. The next is of the tenant whose jobs have taken the least time since nobody waited, and
    the smallest of that tenant's, then the first that came. `clock` gives seconds."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        """Of what waits."""
        self._jobs: list[_Job] = []
        self._spent: Counter[str] = Counter()
        """Seconds, by tenant."""

    def add(self, tenant: str, size: int, run: Callable[[], T]) -> Future[T]:
        """A job, whose `size` tells how long it may take beside others. Cancelling its future takes it out again."""
        job = _Job(tenant, size, run)
        with self._lock:
            self._jobs.append(job)
            self._thread.submit(self._run_next)
        job.future.add_done_callback(lambda _: self._take_out(job))
        return job.future

    def _take_out(self, job: _Job) -> None:
        """What it holds is not kept until its turn would have come."""
        with self._lock:
            if job in self._jobs:
                self._jobs.remove(job)

    def close(self) -> None:
        """Cancel what waits; what runs goes on to its end."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.future.cancel()

    def _run_next(self) -> None:
        """In the thread, once for each job, those that were cancelled included."""
        with self._lock:
            if not self._jobs:
                return
            job = min(self._jobs, key=lambda each: (self._spent[each.tenant], each.size))
            self._jobs.remove(job)
        if job.future.set_running_or_notify_cancel():
            began = self._clock()
            try:
                job.future.set_result(job.run())
            except BaseException as error:
                job.future.set_exception(error)
            with self._lock:
                self._spent[job.tenant] += self._clock() - began  # type: ignore[assignment]
        with self._lock:
            if not self._jobs:
                self._spent.clear()
