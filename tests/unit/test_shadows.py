"""What a draft model holds of sequences: blocks taken, found again, displaced and given back."""

from __future__ import annotations

import random

from pelton.engine.kv_memory import KVMemory
from pelton.engine.sequence import Sequence, SequenceGroup
from pelton.engine.shadows import IDLE, Shadows
from tests.unit.toy_executor import prompt, request


def make(num_blocks: int = 20, windows: tuple[int | None, ...] = (None,), context: int = 10_000) -> Shadows:
    memory = KVMemory(windows, (num_blocks,) * len(windows), max_chunk=64, is_caching=True)
    return Shadows(memory, context)


def sequence(number: int, length: int, salt: str = "") -> Sequence:
    return SequenceGroup(request(str(number), prompt(length, number), salt=salt), number).sequences[0]


def read(shadows: Shadows, one: Sequence, num_ahead: int = 0) -> Sequence:
    """Compute all of a sequence, and some guesses."""
    shadow = shadows.get(one) or shadows.start(one)
    assert shadow is not None
    assert shadows.grow(one, shadow.num_new + num_ahead)
    shadows.memory.commit(shadow, shadow.num_new)
    return shadow


def test_guesses_count_as_far_as_they_came_true():
    shadows, one = make(), sequence(0, 40)
    shadow = read(shadows, one, 8)
    assert (shadow.num_computed, shadow.num_new) == (40, 0)
    shadow.draft.extend([7, 8, 9])
    one.tokens.extend([7, 8, 1])
    assert shadows.get(one) is shadow
    assert (shadow.num_computed, shadow.num_new) == (42, 1)
    shadow.draft.extend([5])
    shadows.memory.commit(shadow, 1)
    shadow.draft = shadow.draft[:0]
    one.tokens.append(2)
    assert shadows.get(one).num_new == 1  # type: ignore[union-attr]
    shadows.check([one])


def test_a_second_shadow_finds_what_the_first_has_read():
    shadows = make()
    first, second, other = sequence(0, 70), sequence(0, 70), sequence(0, 70, salt="other")
    read(shadows, first)
    shadows.forget(first)
    assert shadows.start(second).num_new == 1  # type: ignore[union-attr]
    assert shadows.start(other).num_new == 70  # type: ignore[union-attr]
    shadows.check([second, other])


def test_windows_give_back_what_has_passed_and_never_what_a_guess_that_fails_still_sees():
    shadows, one = make(windows=(None, 40)), sequence(0, 60)
    shadow = read(shadows, one, 30)
    shadow.draft.extend(range(30))  # ahead by a block and not drawn
    one.tokens.append(49)
    shadow = shadows.get(one)  # type: ignore[assignment]
    assert shadow.num_computed == 60
    assert shadow.tables[1][0] != 0  # position 21 is still seen
    shadows.check([one])


def test_the_one_that_was_idle_for_longest_gives_way_and_no_other():
    shadows = make(num_blocks=7)
    old, young, new = (sequence(i, 70 + i) for i in range(3))
    read(shadows, old)
    read(shadows, young)
    assert shadows.start(new) is None
    for _ in range(IDLE):
        shadows.turn()
    assert shadows.grow(young, 10)
    assert shadows.start(new) is not None
    assert shadows.get(old) is None
    assert shadows.get(young) is not None
    shadows.check([young, new])


def test_what_cannot_be_held_is_left_out():
    shadows = make(num_blocks=4)
    assert shadows.start(sequence(0, 96)) is None
    assert shadows.start(sequence(1, 95)) is not None
    assert make(context=50).start(sequence(0, 50)) is None


def test_blocks_are_accounted_for_whatever_happens():
    rng = random.Random(1)
    shadows = make(num_blocks=30, windows=(None, 50))
    live: list[Sequence] = []
    for step in range(600):
        shadows.turn()
        if len(live) < 6 and rng.random() < 0.3:
            live.append(sequence(rng.randrange(9), rng.randrange(1, 150)))
        for one in live:
            shadow = shadows.get(one) or shadows.start(one)
            one.tokens.append(rng.randrange(3))
            if shadow is None or shadows.get(one) is None or rng.random() < 0.3:
                continue
            num_tokens, ahead = rng.randrange(1, shadow.num_new + 1), rng.randrange(5)
            if shadows.grow(one, num_tokens + ahead):
                shadows.memory.commit(shadow, num_tokens)
                if not shadow.num_new:
                    shadow.draft.extend(rng.randrange(3) for _ in range(ahead))
        for one in [one for one in live if rng.random() < 0.03]:
            live.remove(one)
            shadows.forget(one)
        if step % 5 == 0:
            shadows.check(live)
    for one in live:
        shadows.forget(one)
    shadows.check([])
    assert all(pool.num_used == 0 for pool in shadows.memory.pools)
