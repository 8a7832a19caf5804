"""KV memory and its prefix cache against a naive model: the set of all token strings ever computed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.engine.kv_memory import KVMemory
from pelton.engine.prefix_cache import PrefixCache
from pelton.engine.sequence import Sequence, SequenceGroup
from pelton.request import IDLE
from tests.unit.toy_executor import request

CHUNK = 64
# Token strings that share beginnings of any length: a base, cut somewhere, with another tail.
STRINGS = st.builds(
    lambda base, cut, tail, length: ([base] * cut + [tail] * length)[:150],
    st.integers(0, 1),
    st.integers(0, 150),
    st.integers(2, 4),
    st.integers(1, 150),
)


def sequence_of(tokens: list[int], salt: str = "", **more: object) -> Sequence:
    return SequenceGroup(request("r", tokens, salt=salt, **more), 0).sequences[0]


def memory_of(windows: tuple[int | None, ...], num_blocks: int) -> KVMemory:
    return KVMemory(windows, (num_blocks,) * len(windows), max_chunk=CHUNK, is_caching=True)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def compute(memory: KVMemory, sequence: Sequence, tokens: int) -> None:
    """Run a sequence's next tokens, in chunks, as the scheduler would."""
    while tokens:
        chunk = min(tokens, CHUNK)
        assert memory.room(sequence) >= chunk
        memory.grow(sequence, chunk)
        memory.commit(sequence, chunk)
        tokens -= chunk


@settings(max_examples=150, deadline=None)
@given(st.lists(STRINGS, min_size=1, max_size=12))
def test_with_memory_enough_a_match_is_the_longest_ever_computed(strings):
    memory = memory_of((None,), 200)
    known: list[list[int]] = []
    for tokens in strings:
        sequence = sequence_of(tokens)
        match = memory.match(sequence)
        assert match.length == min(len(tokens) - 1, max((common(tokens, other) for other in known), default=0))
        assert memory.can_admit(sequence, match, ())
        memory.attach(sequence, match)
        compute(memory, sequence, sequence.num_new)
        memory.check([sequence])
        memory.publish_tail(sequence)
        memory.release(sequence)
        memory.check([])
        known.append(tokens)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(STRINGS, st.integers(0, 3), st.sampled_from([0, IDLE])), min_size=1, max_size=20),
    st.sampled_from([(None,), (None, 40), (70,), (None, 33, 90)]),
    st.integers(8, 20),
)
def test_with_little_memory_the_books_still_balance(plan, windows, num_blocks):
    """Several sequences at once, some ended early; a match never promises what was not computed."""
    memory = memory_of(windows, num_blocks)
    known: list[list[int]] = []
    live: list[Sequence] = []
    for tokens, num_kept, priority in plan:
        while len(live) > num_kept:
            memory.release(live.pop(0))
            memory.check(live)
        sequence = sequence_of(tokens, priority=priority)
        match = memory.match(sequence)
        assert match.length <= max((common(tokens, other) for other in known), default=0)
        if not memory.can_admit(sequence, match, ()):
            continue
        memory.attach(sequence, match)
        memory.check([*live, sequence])
        live.append(sequence)
        compute(memory, sequence, sequence.num_new)
        memory.publish_tail(sequence)
        known.append(tokens)
        memory.check(live)
    for sequence in live:
        memory.release(sequence)
    memory.check([])
    assert all(pool.num_used == 0 for pool in memory.pools)


def test_a_window_needs_only_what_the_next_token_sees():
    memory = memory_of((None, 40), 50)
    first = sequence_of([1] * 200)
    memory.attach(first, memory.match(first))
    compute(memory, first, 200)
    memory.publish_tail(first)
    memory.release(first)
    held = [node.blocks[1] for node in memory.match(sequence_of([1] * 200)).nodes]
    memory.cache.evict(1, held[2])  # tokens 64 to 95
    for length, expected in [(64, 64), (90, 64), (127, 64), (134, 64), (135, 135), (160, 160), (200, 199)]:
        sequence = sequence_of([1] * length + [2])
        assert memory.match(sequence).length == (expected if length < 200 else 200)
    assert memory.match(sequence_of([1] * 200)).length == 199


def test_no_match_across_namespaces_and_none_without_caching():
    memory = memory_of((None,), 50)
    first = sequence_of([1] * 100, salt="a")
    memory.attach(first, memory.match(first))
    compute(memory, first, 100)
    assert memory.match(sequence_of([1] * 100, salt="a")).length == 96
    assert memory.match(sequence_of([1] * 100, salt="b")).length == 0
    memory.is_caching = False
    assert memory.match(sequence_of([1] * 100, salt="a")).length == 0


def test_the_least_recently_used_leaf_goes_first():
    memory = memory_of((None,), 9)
    for base in (1, 2):  # three blocks and two tokens each: eight blocks in all
        sequence = sequence_of([base] * 98)
        memory.attach(sequence, memory.match(sequence))
        compute(memory, sequence, 98)
        memory.publish_tail(sequence)
        memory.release(sequence)
    again = sequence_of([1] * 98)
    memory.attach(again, memory.match(again))  # makes it the more recent; takes a block for its tail
    memory.release(again)
    assert memory.match(sequence_of([1] * 98)).length == 97
    assert memory.match(sequence_of([2] * 98)).length == 96


def ran(memory: KVMemory, tokens: list[int], **more: object) -> int:
    """Run a sequence to its end; how much of it the cache had."""
    sequence = sequence_of(tokens, **more)
    memory.attach(sequence, match := memory.match(sequence))
    compute(memory, sequence, sequence.num_new)
    memory.publish_tail(sequence)
    memory.release(sequence)
    memory.check([])
    return match.length


@pytest.mark.parametrize("kind", [{"priority": IDLE}, {"pooling": "last"}])
def test_batches_and_embedded_texts_push_out_no_chat(kind):
    memory = memory_of((None, 40), 21)
    chat, shared = [1] * 200, [2] * 64
    ran(memory, chat)
    for line in range(3, 20):
        ran(memory, [line] * 150, **kind)
    assert ran(memory, chat) == 199
    lengths = [ran(memory, [*shared, *[line] * 80], **kind) for line in range(20, 30)]
    if "priority" in kind:  # what is embedded takes less from the cache
        assert lengths == [0, *[64] * 9]
    ran(memory, chat[:160], **kind)  # which uses the chat's own blocks
    for line in range(30, 40):
        ran(memory, [line] * 150, **kind)
    assert ran(memory, chat) == 199


def test_two_who_compute_the_same_end_up_with_the_same_blocks():
    memory = memory_of((None,), 50)
    a, b = sequence_of([1] * 100), sequence_of([1] * 100)
    for sequence in (a, b):
        memory.attach(sequence, memory.match(sequence))
    for sequence in (a, b):
        memory.grow(sequence, 64)
    for sequence in (a, b):
        memory.commit(sequence, 64)
    assert a.tables[0][:2] == b.tables[0][:2]
    memory.check([a, b])
    assert memory.pools[0].num_used == 2


def test_clear_forgets_all_but_what_is_held():
    memory = memory_of((None, 40), 50)
    a = sequence_of([1] * 100)
    memory.attach(a, memory.match(a))
    compute(memory, a, 100)
    memory.clear_cache()
    memory.check([a])
    assert memory.match(sequence_of([1] * 100)).length == 0
    memory.grow(a, 60)
    memory.commit(a, 60)
    memory.release(a)
    memory.check([])


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64])
def test_closest_finds_the_longest_common_beginning(length):
    cache = PrefixCache((None,))
    memory = memory_of((None,), 20)
    cache.pools = memory.pools
    keys = [(1,) * 32, (1,) * 20 + (2,) * 12, (1,) * 20 + (3,) * 12, (2,) * 32, (0,) * 31 + (9,)]
    for key in keys:
        cache.publish("", None, key, [memory.pools[0].allocate()])
    asked = ((1,) * 20 + (2,) * 44)[:length]
    nodes, matched = cache.match("", asked, length)
    assert matched == min(length, 32)
    assert nodes[0].tokens[:matched] == asked[:matched]
