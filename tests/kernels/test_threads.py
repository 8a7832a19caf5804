"""The threads: every chunk of every job is done once, whoever does it, and waiting costs nothing."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from pelton import _core


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("num_chunks", [0, 1, 2, 7, 200])
def test_every_chunk_is_done_once_per_job(num_threads: int, num_chunks: int) -> None:
    machine = _core.Machine("generic", num_threads)
    counts = np.zeros((num_chunks, 16), np.int32)
    machine.hand_out(counts, 3000)
    assert counts[:, 0].tolist() == [3000] * num_chunks
    assert not counts[:, 1:].any()


def test_pauses_between_jobs_lose_nothing() -> None:
    machine = _core.Machine("generic", 3)
    counts = np.zeros((9, 16), np.int32)
    for i in range(60):  # some shorter than the threads spin, some so long that they sleep
        machine.hand_out(counts, 1)
        time.sleep(0.0001 * (i % 6))
    assert counts[:, 0].tolist() == [60] * 9


def test_several_pools_share_the_cores() -> None:
    """More threads than cores: a thread that waits for one that was put aside lets it run."""
    machines = [_core.Machine("generic", 2 * (os.cpu_count() or 1)) for _ in range(3)]
    counts = np.zeros((50, 16), np.int32)
    start = time.process_time()
    for _ in range(20):
        for machine in machines:
            machine.hand_out(counts, 5)
    assert counts[:, 0].tolist() == [300] * 50
    assert time.process_time() - start < 5


def test_idle_threads_take_no_time() -> None:
    machine = _core.Machine("generic", 4)
    machine.hand_out(np.zeros((8, 16), np.int32), 100)
    time.sleep(0.05)
    start = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - start < 0.02
