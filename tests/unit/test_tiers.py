"""The disk tier: what comes back is what was computed, and nothing that happens to its files changes an answer."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pelton.engine import segments
from pelton.engine.engine import Engine
from pelton.engine.kv_memory import Fetch
from pelton.engine.pace import Pace, Prices
from pelton.engine.tiers import DiskTier, Place, WriteBudget
from pelton.formats import bounded_folder
from pelton.formats.bounded_folder import BoundedFolder
from pelton.ops.data import BLOCK_TOKENS
from pelton.request import Done, ErrorEvent
from tests.unit.toy_executor import TOKEN_BYTES, ToyExecutor, Transcript, make_engine, prompt, request, run

WINDOWS = [(None,), (None, 40), (70,), (None, 33, 90)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BoundedFolder:
    monkeypatch.setattr(bounded_folder, "SPARE_DISK", 0)
    return BoundedFolder(str(tmp_path / "prefixes"), 1 << 30, "prefix")


def until(is_so: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def tier_of(engine: Engine) -> DiskTier:
    assert engine._tier is not None
    return engine._tier


@contextmanager
def life(folder: BoundedFolder | None, **settings: object) -> Iterator[tuple[Engine, ToyExecutor]]:
    """An engine from its start to its end, with nothing in its memory as it starts."""
    engine, executor = make_engine(prefixes=folder, **settings)  # type: ignore[arg-type]
    try:
        yield engine, executor
    finally:
        engine.close()


def cached(transcript: Transcript, id: str = "a") -> int:
    done = transcript.last(id)
    assert isinstance(done, Done)
    return done.usage.cached_tokens


def files(folder: BoundedFolder) -> list[Path]:
    return sorted(Path(folder.folder).glob("*.prefix"))


def keep(folder: BoundedFolder, tokens: list[int], **settings: object) -> Transcript:
    """Have a first engine compute and write a prompt."""
    with life(folder, **settings) as (engine, _):
        transcript = run(engine, [request("a", tokens)])
        until(lambda: tier_of(engine).num_written and not tier_of(engine)._offers)
        until(lambda: not list(Path(folder.folder).glob("*.partial")))
    return transcript


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_second_life_has_what_the_first_one_computed(folder: BoundedFolder, windows: tuple[int | None, ...]):
    tokens = prompt(330)
    fresh = keep(folder, tokens, windows=windows)
    assert cached(fresh) == 0
    with life(folder, windows=windows, speculation="off") as (engine, executor):
        again = run(engine, [request("a", tokens)])
        assert cached(again) == 320
        assert sum(len(step.ids) for step in executor.steps) < 60  # drafts included
        assert again.answers("a") == fresh.answers("a")
        longer = [*tokens[:200], *prompt(100, 9)]
        other = run(engine, [request("b", longer)])
        assert cached(other, "b") >= 192 or any(windows)  # their middle is read only where that is faster
    with life(None, windows=windows) as (engine, _):
        assert run(engine, [request("b", longer)]).answers("b") == other.answers("b")


def test_a_window_reads_only_what_it_needs(folder: BoundedFolder):
    tokens = prompt(330)
    keep(folder, tokens, windows=(None, 40))
    with life(folder, windows=(None, 40)) as (engine, _):
        run(engine, [request("a", tokens)])
        assert engine.counters.disk_bytes_read == (10 + 2) * BLOCK_TOKENS * TOKEN_BYTES


def test_prompts_of_another_salt_or_model_share_nothing(folder: BoundedFolder):
    tokens = prompt(330)
    keep(folder, tokens)
    with life(folder) as (engine, _):
        assert cached(run(engine, [request("a", tokens, salt="mine")])) == 0
    with life(folder, digest="another") as (engine, _):
        assert cached(run(engine, [request("a", tokens)])) == 0


def test_nothing_is_read_or_written_before_the_model_is_known(folder: BoundedFolder):
    tokens = prompt(330)
    keep(folder, tokens)
    with life(folder, digest=None) as (engine, _):
        assert cached(run(engine, [request("a", tokens)])) == 0
        engine.memory.clear_cache()
        engine.runner.digest = "toy"
        engine._open_tier()
        assert cached(run(engine, [request("b", tokens)]), "b") == 320


@pytest.mark.parametrize("place", [0, 3, 40, 2000, 4096, 5000, -1])
def test_a_damaged_file_costs_time_and_nothing_else(folder: BoundedFolder, place: int):
    tokens = prompt(330)
    fresh = keep(folder, tokens)
    (file,) = files(folder)
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)
    with life(folder) as (engine, _):
        again = run(engine, [request("a", tokens)])
        assert again.answers("a") == fresh.answers("a")
        is_padding = 1500 < place < 4096
        assert (cached(again) < 320) == (not is_padding)
        assert file.exists() == is_padding


def test_a_file_that_is_cut_short_is_removed(folder: BoundedFolder):
    tokens = prompt(330)
    fresh = keep(folder, tokens)
    (file,) = files(folder)
    data = file.read_bytes()
    for length in (0, 5, 28, 300, 4096, 4097, len(data) - 1):
        file.write_bytes(data[:length])
        with life(folder) as (engine, _):
            again = run(engine, [request("a", tokens)])
            assert (again.answers("a"), cached(again)) == (fresh.answers("a"), 0)
            assert not file.exists()
        for again_written in files(folder):
            again_written.unlink()


def test_a_file_that_was_removed_meanwhile_is_no_error(folder: BoundedFolder):
    tokens = prompt(330)
    fresh = keep(folder, tokens)
    with life(folder) as (engine, _):
        files(folder)[0].unlink()
        again = run(engine, [request("a", tokens)])
        assert (again.answers("a"), cached(again)) == (fresh.answers("a"), 0)


def test_those_who_wait_for_the_same_blocks_wait_for_one_read(folder: BoundedFolder):
    tokens = prompt(330)
    keep(folder, tokens)
    with life(folder) as (engine, _):
        transcript = run(engine, [request(str(i), [*tokens, i]) for i in range(5)])
        assert [cached(transcript, str(i)) for i in range(5)] == [320] * 5
        assert engine.counters.disk_bytes_read == 10 * BLOCK_TOKENS * TOKEN_BYTES


def test_who_is_aborted_while_it_waits_leaves_the_others_waiting(folder: BoundedFolder):
    tokens = prompt(330)
    keep(folder, tokens)
    with life(folder) as (engine, _):
        tier = tier_of(engine)
        read, tier._read = tier._read, lambda fetch, places: (time.sleep(0.1), read(fetch, places))[1]  # type: ignore[method-assign]
        transcript = Transcript()
        for id, n in (("a", 1), ("b", 1), ("c", 3)):
            engine.submit(request(id, tokens, n=n))
        transcript.add(engine.step())
        assert [s.state for s in engine.scheduler.in_flight.fetching.sequences] == ["loading"] * 3
        engine.abort("a")
        engine.abort("c", 0)
        engine.check()
        run(engine, [], transcript)
        assert (cached(transcript, "b"), cached(transcript, "c")) == (320, 320)
        assert len(transcript.tokens("c", 1)) == 8


def test_who_waits_for_the_disk_counts_in_the_queue(folder: BoundedFolder):
    tokens = prompt(330)
    keep(folder, tokens)
    with life(folder, max_sequences=1, max_queue=2) as (engine, _):
        tier = tier_of(engine)
        read, tier._read = tier._read, lambda fetch, places: (time.sleep(0.1), read(fetch, places))[1]  # type: ignore[method-assign]
        transcript = Transcript()
        for id in "abc":
            engine.submit(request(id, tokens))
            transcript.add(engine.step())
        assert [s.state for s in engine.scheduler.in_flight.fetching.sequences] == ["loading"] * 3
        engine.submit(request("d", tokens))
        transcript.add(engine.step())
        last = transcript.last("d")
        assert isinstance(last, ErrorEvent)
        assert last.message.startswith("3 requests with 990 prompt tokens are waiting")
        run(engine, [], transcript)
        assert isinstance(transcript.last("c"), Done)


def test_a_step_that_fails_while_blocks_are_read_loses_none(folder: BoundedFolder):
    tokens = prompt(330)
    fresh = keep(folder, tokens)
    with life(folder) as (engine, executor):
        engine.submit(request("a", tokens))
        engine.step()
        engine.submit(request("b", prompt(5)))
        executor.fail_next = True
        until(lambda: engine.has_work)
        while executor.fail_next:
            engine.advance()
        until(lambda: not engine.memory.fetches or not engine.advance())
        while engine.has_work or engine.memory.fetches:
            engine.advance()
            engine.check()
        assert run(engine, [request("c", tokens)]).answers("c")[0].token_id == fresh.answers("a")[0].token_id  # type: ignore[union-attr]


@pytest.mark.parametrize("windows", WINDOWS[:2])
def test_under_pressure_answers_are_those_of_an_engine_without(folder: BoundedFolder, windows: tuple[int | None, ...]):
    """Little memory, prompts that share beginnings, several lives: reads, evictions, preemptions and writes at once."""
    dice = random.Random(3)
    bases = [prompt(400, base) for base in range(3)]

    def requests(life_number: int) -> list:
        made = []
        for i in range(12):
            tokens = dice.choice(bases)[: dice.randrange(40, 400)] + prompt(dice.randrange(1, 60), dice.randrange(99))
            made.append(request(f"{life_number}-{i}", tokens, n=dice.choice([1, 1, 2]), max_tokens=12))
        return made

    total = 0
    for number in range(4):
        asked = requests(number)
        with life(folder, windows=windows, num_blocks=40) as (engine, _):
            transcript = run(engine, asked)
            until(lambda engine=engine: not tier_of(engine)._offers)
            total += engine.counters.disk_bytes_read
        with life(None, windows=windows) as (plain, _):
            alone = run(plain, asked)
        for one in asked:
            assert transcript.answers(one.id) == alone.answers(one.id)
    assert total > 0


def test_what_is_copied_out_is_copied_before_the_disk_writes_there(folder: BoundedFolder):
    tokens = prompt(330, 7)
    keep(folder, tokens)
    displaced = request("displaced", prompt(150, 1), max_tokens=60, priority=1)
    with life(None, num_blocks=13) as (engine, _):
        alone = run(engine, [displaced]).answers("displaced")
    with life(folder, num_blocks=13, swap=10_000, max_sequences=1) as (engine, _):
        engine.scheduler.admission.pace = engine.scheduler.in_flight.fetching.pace = Pace(prices=Prices())
        tier, transcript = tier_of(engine), Transcript()

        def read_at_once(fetch: Fetch, places: list[Place]) -> None:
            tier._fetched.append((fetch, tier._read(fetch, places)))

        tier.fetch = read_at_once  # type: ignore[method-assign]
        engine.submit(displaced)
        for _ in range(20):
            transcript.add(engine.step())
        engine.submit(request("a", tokens))
        run(engine, transcript=transcript)
        assert cached(transcript) == 320
        assert engine.counters.swapped == 1
    assert transcript.answers("displaced") == alone


def test_a_folder_that_cannot_be_written_turns_writing_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("in the way")
    folder = BoundedFolder(str(tmp_path / "file" / "prefixes"), 1 << 30, "prefix")
    with life(folder) as (engine, _):
        for i in range(3):
            run(engine, [request("a", prompt(330, i))])
        until(lambda: not tier_of(engine)._threads[0].is_alive())
    assert len([record for record in caplog.records if "not kept" in record.message]) == 1


def test_the_same_prefix_is_written_once_and_what_follows_it_by_itself(folder: BoundedFolder):
    tokens = prompt(330)
    keep(folder, tokens)
    with life(folder) as (engine, _):
        run(engine, [request("a", tokens)])
        run(engine, [request("b", [*tokens, *prompt(300, 4)])])
        until(lambda: tier_of(engine).num_written)
        until(lambda: not tier_of(engine)._offers)
    assert [file.stat().st_mode & 0o777 for file in files(folder)] == [0o600, 0o600]
    with life(folder) as (engine, _):
        assert cached(run(engine, [request("b", [*tokens, *prompt(300, 4)])]), "b") == 608


def test_a_short_prompt_is_not_worth_a_file_until_it_is_shared(folder: BoundedFolder):
    with life(folder) as (engine, _):
        run(engine, [request("a", prompt(100))])
        assert not tier_of(engine)._offers
        run(engine, [request("b", prompt(100))])
        until(lambda: files(folder))


def test_a_block_that_changes_while_it_is_read_is_not_written(folder: BoundedFolder):
    tokens = prompt(330)
    with life(folder, num_blocks=16) as (engine, _):
        tier = tier_of(engine)
        copy = tier._store.read_block
        seen: list[int] = []

        def read_and_clear(group: int, block: int) -> bytes:
            data = copy(group, block)
            if len(seen) == 3:
                engine.memory.clear_cache()
            seen.append(block)
            return data

        tier._store.read_block = read_and_clear  # type: ignore[method-assign]
        run(engine, [request("a", tokens)])
        until(lambda: files(folder))
    with life(folder) as (engine, _):
        assert cached(run(engine, [request("a", tokens)])) == 96


def test_the_budget_of_writes_fills_up_with_time_and_keeps_half_for_what_is_shared():
    now = [0.0]
    budget = WriteBudget(800, lambda: now[0])
    assert budget.take(100, is_shared=False)
    assert not budget.take(1, is_shared=False)
    assert budget.take(100, is_shared=True)
    assert not budget.take(1, is_shared=True)
    now[0] = 3600 / 8
    assert budget.take(100, is_shared=True)
    now[0] = 1e6
    assert not budget.take(201, is_shared=True)


def test_names_differ_in_whatever_the_blocks_depend_on():
    tokens = prompt(96)
    first = list(segments.chain("f", "s", tokens))
    assert len(first) == 3
    assert first[:2] == list(segments.chain("f", "s", tokens[:64]))
    for other in (("g", "s", tokens), ("f", "", tokens), ("fs", "", tokens), ("f", "s", [7, *tokens[1:]])):
        assert not set(first) & set(segments.chain(*other))


def test_a_header_is_whole_or_nothing():
    file = io.BytesIO()
    segment = segments.write(file, [b"a" * 16, b"b" * 16], 2, lambda index: [b"x" * 100, b"" if index else b"y" * 50])
    assert segment is not None
    assert [segment.place(i, group) for i in (0, 1) for group in (0, 1)] == [
        (4096, 100),
        (4196, 50),
        (4246, 100),
        (4346, 0),
    ]
