"""Who leaves for whom: pure policy over numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.errors import InsufficientMemory
from pelton.pool.room import Held, Leave, Room, make_room

MIB = 1 << 20


def held(name: str, memory: int, used_at: float, *, busy: bool = False) -> Held:
    return Held(name, memory, not busy, used_at)


def test_where_there_is_room_nobody_leaves():
    assert make_room("x", 10, 20, [held("a", 50, 1)], available=20) == Room(20)


def test_the_one_that_was_not_used_for_longest_leaves():
    others = [held("new", 50, 3), held("old", 50, 1), held("middle", 50, 2)]
    assert make_room("x", 10, 60, others, available=20) == Leave(("old",))
    assert make_room("x", 10, 100, others, available=20) == Leave(("old", "middle"))


def test_idle_ones_leave_before_busy_ones():
    others = [held("busy", 50, 1, busy=True), held("idle", 50, 2)]
    assert make_room("x", 10, 60, others, available=20) == Leave(("idle",))
    assert make_room("x", 10, 100, others, available=20) == Leave(("idle", "busy"))


def test_none_leaves_that_need_not():
    others = [held("small", 5, 1), held("big", 100, 2)]
    assert make_room("x", 10, 100, others, available=0) == Leave(("big",))


def test_what_does_not_fit_with_the_usual_context_gets_what_there_is():
    assert make_room("x", 10, 1000, [held("a", 50, 1)], available=20) == Leave(("a",))
    assert make_room("x", 10, 1000, [], available=70) == Room(70)


def test_what_cannot_fit_is_refused_with_numbers():
    with pytest.raises(InsufficientMemory, match=r"x needs at least 300.0 MiB, but only 150.0 MiB .* \(100.0 MiB are"):
        make_room("x", 300 * MIB, 400 * MIB, [held("a", 50 * MIB, 1)], available=100 * MIB)
    with pytest.raises(InsufficientMemory, match=r"1 that stay beside it have 50.0 MiB"):
        make_room("x", 120 * MIB, 400 * MIB, [Held("a", 50 * MIB, True, 1.0, False)], available=100 * MIB)


def test_no_more_than_so_many_at_once():
    others = [held("a", 0, 2), held("b", 0, 1)]
    assert make_room("x", 0, 0, others, available=9, max_models=3) == Room(9)
    assert make_room("x", 0, 0, others, available=9, max_models=2) == Leave(("b",))
    assert make_room("x", 0, 0, others, available=9, max_models=1) == Leave(("b", "a"))
    with pytest.raises(InsufficientMemory, match="one more than may be loaded at once"):
        make_room("x", 0, 0, [Held("a", 0, True, 1.0, False)], available=9, max_models=1)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.integers(0, 9), st.booleans()), max_size=6),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 7),
)
def test_what_is_decided_is_enough_and_no_more(others, least, more, available, max_models):
    models = [Held(str(i), memory, idle, used, stays) for i, (memory, idle, used, stays) in enumerate(others)]
    usual = least + more
    most = available + sum(each.memory for each in models if each.can_leave)
    try:
        decided = make_room("x", least, usual, models, available=available, max_models=max_models)
    except InsufficientMemory:
        num_staying = sum(not each.can_leave for each in models)
        assert most < least or (max_models and num_staying >= max_models)
        return
    leaving = [each for each in models if isinstance(decided, Leave) and each.name in decided.names]
    assert all(each.can_leave for each in leaving)
    assert available + sum(each.memory for each in leaving) >= min(usual, most) >= least
    assert not max_models or len(models) - len(leaving) < max_models
    if isinstance(decided, Room):
        assert decided.memory == available
    else:
        again = [each for each in models if each not in leaving]
        after = available + sum(each.memory for each in leaving)
        assert make_room("x", least, usual, again, available=after, max_models=max_models) == Room(after)
        for each in leaving:  # each of them is needed
            without = after - each.memory
            too_many = max_models and len(again) + 1 >= max_models
            assert without < min(usual, most) or too_many
