"""Whose turn it is at the one thread that compiles grammars."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from pelton.engine.fair_jobs import FairJobs


class Jobs:
    """Jobs that take as long as they say, on a clock of their own; the first one runs until the others are there."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []
        self.go_on = threading.Event()
        self.jobs = FairJobs("test", clock=lambda: self.now)
        self.begun = threading.Event()
        self.first = self.add("first", "nobody", 0, 1.0)
        assert self.begun.wait(30)

    def add(self, name: str, tenant: str, size: int, seconds: float) -> Future[str]:
        def run() -> str:
            self.begun.set()
            self.go_on.wait(30)
            self.now += seconds
            self.ran.append(name)
            return name

        return self.jobs.add(tenant, size, run)


def test_a_tenant_waits_for_one_job_of_another_and_not_for_all():
    jobs = Jobs()
    futures = [jobs.add(f"hostile {number}", "hostile", 9, 3.0) for number in range(5)]
    futures += [jobs.add(f"kind {number}", "kind", 9, 0.5) for number in range(3)]
    jobs.go_on.set()
    for future in futures:
        future.result(30)
    kind = [f"kind {number}" for number in range(3)]
    assert jobs.ran == ["first", "hostile 0", *kind, *(f"hostile {number}" for number in range(1, 5))]
    jobs.jobs.close()


def test_a_tenants_smallest_comes_first_and_time_is_forgotten_when_nobody_waits():
    jobs = Jobs()
    futures = [jobs.add(str(size), "a", size, 5.0) for size in (30, 10, 20)]
    jobs.go_on.set()
    for future in futures:
        future.result(30)
    assert jobs.ran == ["first", "10", "20", "30"]
    jobs.jobs._thread.shutdown(wait=True)
    assert not jobs.jobs._spent


def test_what_is_cancelled_does_not_run_and_what_fails_tells_why():
    jobs = Jobs()
    left, kept = jobs.add("left", "a", 1, 1.0), jobs.add("kept", "a", 2, 1.0)
    broken = jobs.jobs.add("b", 0, lambda: 1 // 0)
    assert left.cancel()
    jobs.go_on.set()
    assert kept.result(30) == "kept"
    with pytest.raises(ZeroDivisionError):
        broken.result(30)
    assert jobs.ran == ["first", "kept"]
    jobs.jobs.close()


def test_closing_cancels_what_waits():
    jobs = Jobs()
    waits = jobs.add("waits", "a", 1, 1.0)
    jobs.jobs.close()
    jobs.go_on.set()
    assert waits.cancelled()
    assert jobs.first.result(30) == "first"


def test_what_was_cancelled_is_not_held_until_its_turn():
    jobs = Jobs()
    grammars = [jobs.add(str(number), "a", number, 1.0) for number in range(5)]
    for future in grammars[1:]:
        future.cancel()
    assert len(jobs.jobs._jobs) == 1
    jobs.go_on.set()
    assert grammars[0].result(30) == "0"
    assert jobs.add("last", "b", 0, 1.0).result(30) == "last"
    assert jobs.ran == ["first", "0", "last"]
    jobs.jobs.close()
