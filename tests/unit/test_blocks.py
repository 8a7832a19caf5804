"""The block pool against a naive model: sets, and a list in order of last use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pelton.engine.blocks import BlockPool
from pelton.errors import InternalError


class PoolMachine(RuleBasedStateMachine):
    """Every operation that a sequence or the cache may make, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(7, self.on_evict)
        self.holds: list[int] = []  # one entry per holder
        self.retained: set[int] = set()
        self.idle: list[int] = []  # least recently used first

    def on_evict(self, block: int) -> None:
        self.evicted.append(block)
        self.pool.forget(block)

    @precondition(lambda self: self.pool.num_available)
    @rule()
    def allocate(self) -> None:
        had_free = self.pool.num_available > len(self.idle)
        oldest = self.idle[0] if self.idle else None
        block = self.pool.allocate()
        assert block not in self.holds
        assert 1 <= block < 7
        if had_free:
            assert not self.evicted
            assert block not in self.retained
        else:
            assert self.evicted == [oldest] == [block]
            self.idle.remove(block)
            self.retained.remove(block)
            self.evicted.clear()
        self.holds.append(block)

    @precondition(lambda self: self.holds or self.idle)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.holds, *self.idle})))
        self.pool.take(block)
        self.holds.append(block)
        if block in self.idle:
            self.idle.remove(block)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.holds))
        self.holds.remove(block)
        self.pool.give(block)
        if block not in self.holds and block in self.retained:
            self.idle.append(block)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.holds))
        self.pool.retain(block)
        self.retained.add(block)

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.retained)))
        self.pool.forget(block)
        self.retained.remove(block)
        if block in self.idle:
            self.idle.remove(block)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check({block: self.holds.count(block) for block in self.holds}, self.retained)
        assert self.pool.num_used == len(set(self.holds))
        assert self.pool.num_available == 6 - len(set(self.holds))
        assert all(self.pool.is_idle(block) for block in self.idle)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_the_check_finds_what_is_wrong():
    pool = BlockPool(4, lambda block: None)
    block = pool.allocate()
    pool.check({block: 1}, set())
    with pytest.raises(InternalError, match="reference counts"):
        pool.check({}, set())
    with pytest.raises(InternalError, match="retained"):
        pool.check({block: 1}, {block})
    pool._free.append(pool._free[0])
    with pytest.raises(InternalError, match="lost or free twice"):
        pool.check({block: 1}, set())
