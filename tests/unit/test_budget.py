"""How memory is divided: exact, never over what is free, and said with numbers where it does not fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.engine import machine
from pelton.engine.budget import DraftNeeds, MemoryNeeds, Wishes, divide, peak_blocks, required
from pelton.errors import InsufficientMemory

MIB = 1 << 20


def needs(*sizes: int, windows: tuple[int | None, ...] = (None,), **changes: int) -> MemoryNeeds:
    fields = {"weights": 100 * MIB, "arena": 10 * MIB, "max_chunk": 512, "max_sequences": 64, **changes}
    return MemoryNeeds(bytes_per_block=sizes, windows=windows, **fields)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([(None,), (512,), (None, 512), (None, 100, 40)]),
    st.lists(st.integers(1000, 2_000_000), min_size=3, max_size=3),
    st.integers(1, 40_000),
    st.integers(120 * MIB, 20_000 * MIB),
    st.sampled_from([0, 20 * MIB, 300 * MIB]),
    st.booleans(),
)
def test_the_division_fits_and_holds_one_whole_context(windows, sizes, context, available, kv_memory, is_shared):
    asked = needs(*sizes[: len(windows)], windows=windows)
    wishes = Wishes(context, kv_memory=kv_memory, swap_memory=64 * MIB, is_shared=is_shared)
    least, usual = required(asked, wishes)
    try:
        plan = divide(asked, wishes, available)
    except InsufficientMemory:
        assert available < least or kv_memory
        return
    assert available >= least
    if available >= usual and not kv_memory:
        assert plan.context >= wishes.usual_context
    assert plan.weights + plan.arena + plan.kv + plan.swap <= available
    assert 0 <= plan.swap <= min(64 * MIB, plan.kv)
    assert plan.kv == sum(count * size for count, size in zip(plan.num_blocks, sizes, strict=False))
    assert not kv_memory or plan.kv <= kv_memory
    assert min(context, 512) <= plan.context <= context
    for count, window in zip(plan.num_blocks, windows, strict=True):
        assert count - 1 >= peak_blocks(plan.context, window, 512)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([(None,), (None, 512)]),
    st.lists(st.integers(1000, 2_000_000), min_size=4, max_size=4),
    st.integers(1, 40_000),
    st.integers(1, 40_000),
    st.integers(160 * MIB, 20_000 * MIB),
    st.sampled_from([0, 20 * MIB, 300 * MIB]),
    st.booleans(),
)
def test_a_draft_model_has_its_part(windows, sizes, context, draft_context, available, kv_memory, is_shared):
    asked, drafting = (
        needs(*sizes[: len(windows)], windows=windows),
        needs(*sizes[2 : 2 + len(windows)], windows=windows),
    )
    draft = DraftNeeds(drafting, draft_context)
    wishes = Wishes(context, kv_memory=kv_memory, swap_memory=64 * MIB, is_shared=is_shared)
    least, usual = required(asked, wishes, draft)
    try:
        plan = divide(asked, wishes, available, draft)
    except InsufficientMemory:
        assert available < least or kv_memory
        return
    assert plan.draft is not None
    assert available >= least
    if available >= usual and not kv_memory:
        assert plan.context >= wishes.usual_context
    assert plan.total <= available
    assert not kv_memory or plan.kv + plan.draft.kv <= kv_memory
    assert min(context, draft_context, 512) <= plan.draft.context <= min(context, draft_context)
    one = drafting.kv_of_one(min(context, draft_context, 512))
    assert not kv_memory or plan.draft.kv <= max(kv_memory // 4, one)


def test_a_model_that_does_not_fit_beside_its_draft_model_says_what_both_need():
    draft = DraftNeeds(needs(MIB, weights=70 * MIB, arena=5 * MIB), 4096)
    with pytest.raises(InsufficientMemory, match=r"100\.0 MiB for weights.*its draft model 70\.0 MiB and 5\.0 MiB"):
        divide(needs(MIB), Wishes(4096), 150 * MIB, draft)


def test_one_group_takes_all_of_its_budget():
    plan = divide(needs(MIB), Wishes(4096, is_fixed=True, kv_memory=500 * MIB), 2000 * MIB)
    assert plan.kv == 500 * MIB
    assert plan.num_blocks == (500,)


def test_unset_it_takes_a_quarter_of_what_is_left():
    plan = divide(needs(MIB), Wishes(4096), 2110 * MIB)
    assert plan.kv == 500 * MIB


def test_no_more_than_all_sequences_can_use():
    plan = divide(needs(MIB, max_sequences=2), Wishes(320), 1 << 40)
    assert plan.num_blocks == (21,)


def test_groups_share_in_the_proportion_of_their_sequences():
    asked = needs(MIB, MIB, windows=(None, 480))
    plan = divide(asked, Wishes(8192, is_fixed=True, kv_memory=2000 * MIB), 1 << 36)
    full, window = plan.num_blocks
    assert full / window == pytest.approx(129 / 33, rel=0.05)
    assert plan.kv > 1950 * MIB


@pytest.mark.parametrize("length", [128, 512, 2048, 8192])
def test_neither_group_starves_the_other(length):
    """Gemma's shape, five windowed layers to a full one: sequences of any usual length find at least six tenths of the
    places that a division made for their length would have."""
    asked = needs(MIB, 5 * MIB, windows=(None, 512))
    plan = divide(asked, Wishes(8192, is_fixed=True, kv_memory=6000 * MIB), 1 << 36)
    peaks = [peak_blocks(length, window, 512) for window in (None, 512)]
    places = min((count - 1) // peak for count, peak in zip(plan.num_blocks, peaks, strict=True))
    ideal = plan.kv / (peaks[0] * MIB + peaks[1] * 5 * MIB)
    assert places >= 0.6 * ideal


def test_a_context_that_was_not_asked_for_is_cut_and_one_that_was_is_refused():
    plan = divide(needs(MIB), Wishes(8192, kv_memory=65 * MIB), 1000 * MIB)
    assert plan.context == 2048
    assert "context 2048 tokens" in str(plan)
    with pytest.raises(InsufficientMemory, match=r"8192 tokens needs 257.0 MiB .* 65.0 MiB, which hold 2048 tokens"):
        divide(needs(MIB), Wishes(8192, is_fixed=True, kv_memory=65 * MIB), 1000 * MIB)


def test_what_does_not_fit_is_said_with_numbers():
    with pytest.raises(InsufficientMemory, match=r"100.0 MiB for weights.*only 90.0 MiB are free"):
        divide(needs(MIB), Wishes(512), 90 * MIB)
    with pytest.raises(InsufficientMemory, match=r"500.0 MiB of KV memory, but only 200.0 MiB are free"):
        divide(needs(MIB), Wishes(512, kv_memory=500 * MIB), 200 * MIB)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    free = machine.free_memory()
    assert free > 0
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert machine.free_memory() > 1 << 20
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 300\n")
    assert machine.free_memory() == 500_000 - 1000 + 300


def test_private_memory_of_a_process():
    assert 1 << 20 < machine.private_memory(os.getpid()) < 1 << 40
    assert machine.private_memory(None) == 0


def test_threads_of_one_core_count_once_and_a_containers_share_bounds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5, 6})
    assert machine.num_cores() == 6  # nothing is known of siblings
    for cpu in range(8):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert machine.num_cores() == 3
    for quota, cores in (("max 100000", 3), ("150000 100000", 2), ("20000 100000", 1), ("900000 100000", 3)):
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert machine.num_cores() == cores


def test_a_model_that_shares_leaves_memory_to_others():
    available = 10_110 * MIB
    alone = divide(needs(MIB), Wishes(1 << 18), available)
    shared = divide(needs(MIB), Wishes(1 << 18, is_shared=True), available)
    assert (alone.context, alone.total) == (1 << 18, 110 * MIB + 8193 * MIB)
    assert (shared.kv, shared.context) == (2500 * MIB, 2499 * 32)
    little = divide(needs(MIB), Wishes(1 << 18, is_shared=True), 370 * MIB)
    assert little.context == 8192
    asked = divide(needs(MIB), Wishes(1 << 18, is_fixed=True, is_shared=True), available)
    assert asked.context == 1 << 18
