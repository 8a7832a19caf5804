"""An executor without a model, for tests of the engine: its "keys" are token ids in real paged memory, its next token
is a digest of all that the last token can see through its tables. Any fault in a table, a copy or a block that is
given back too early changes the output, or reads a slot that was never written."""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pelton.backends.base import NO_TOKEN, Processing, SampleArrays, Sampled, StepProfile
from pelton.config import EngineConfig
from pelton.engine.budget import MemoryBudget
from pelton.engine.engine import Engine
from pelton.engine.protocol import StepEvent, Unfold
from pelton.engine.runner import Runner
from pelton.formats.bounded_folder import BoundedFolder
from pelton.ops.data import BLOCK_TOKENS, NULL_BLOCK, Batch
from pelton.request import (
    Accepted,
    Done,
    Embedding,
    EngineRequest,
    ErrorEvent,
    Event,
    Finish,
    Pooling,
    PromptEvent,
    SamplingParams,
    TokenEvent,
)

VOCAB = 50
TOP = 4
TOKEN_BYTES = 4
"""Of KV memory."""
WIDTH = 3


def digest(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def view(tokens: Sequence[int] | np.ndarray) -> int:
    """What the toy model takes in of the tokens that it sees."""
    return zlib.crc32(np.ascontiguousarray(tokens, np.int32))


def next_token(
    views: tuple[int, ...], params: SampleArrays, row: int, mu: float = 0, also_banned: Iterable[int] = ()
) -> int:
    """What the toy model draws, from what each cache group shows of the tokens so far."""
    seen: list[object] = [views]
    if params.temperature[row] > 0:
        seen.append((int(params.seed[row]), int(params.choice[row]), int(params.position[row])))
    low, high = params.history_offsets[row : row + 2]
    history = zip(params.history_ids[low:high].tolist(), params.history_counts[low:high].tolist(), strict=True)
    seen.append(sorted(history))
    if params.mirostat_tau[row] > 0:
        seen.append(mu)
    token = digest(*seen) % VOCAB
    banned = banned_in(params, row) | set(also_banned)
    while token in banned and len(banned) < VOCAB:
        token = (token + 1) % VOCAB
    return token


def banned_in(params: SampleArrays, row: int) -> set[int]:
    low, high = params.bias_offsets[row : row + 2]
    banned = set(params.bias_ids[low:high][params.bias_values[low:high] <= -1e9].tolist()) if low < high else set()
    if params.masks is not None and params.mask_rows is not None and params.mask_rows[row] >= 0:
        allowed = int.from_bytes(params.masks[params.mask_rows[row]].astype("<u4").tobytes(), "little")
        banned |= {id for id in range(VOCAB) if not allowed >> id & 1}
    return banned


@functools.lru_cache(10_000)
def ranking(views: tuple[int, ...]) -> list[tuple[int, float]]:
    """All tokens with what the toy model calls their logprobs, the likeliest first."""
    logprobs = [float(np.float32(-digest(views, id) / 2**32)) for id in range(VOCAB)]
    return sorted(enumerate(logprobs), key=lambda each: (-each[1], each[0]))


class ToyPending:
    def __init__(self, views: list[tuple[int, ...]], pooled: list[tuple[int, ...]]) -> None:
        self.views = views
        self.pooled = pooled
        self.sampled: tuple[SampleArrays, Sampled] | None = None

    def wait(self) -> None:
        pass

    def states(self) -> np.ndarray:
        values = [[digest(seen, i) / 2**32 - 0.5 for i in range(WIDTH)] for seen in self.pooled]
        return np.array(values, np.float32).reshape(-1, WIDTH)

    def logits(self) -> np.ndarray:
        raise NotImplementedError

    def sample(self, params: SampleArrays, processing: Processing | None = None) -> Sampled:
        assert len(params.temperature) == len(self.views) == len(params.history_offsets) - 1
        most = int(params.num_logprobs.max())
        banned: dict[int, list[int]] = {}
        if processing is not None:
            processed = np.zeros((len(processing.rows), VOCAB), np.float32)
            processing.apply(processing.rows.tolist(), processed)
            banned = {r: np.flatnonzero(p < 0).tolist() for r, p in zip(processing.rows, processed, strict=True)}
        ids: list[int] = []
        mus: list[float] = []
        for row, seen in enumerate(self.views):
            mu = mus[-1] if params.chain[row] else float(params.mirostat_mu[row])
            target = int(params.targets[row])
            ids.append(next_token(seen, params, row, mu, banned.get(row, ())) if target < 0 else target)
            mus.append(mu + (ids[-1] / 2 if params.mirostat_tau[row] > 0 else 0))
        # What a row did not ask for is a token that there is not.
        unasked = [(-1, 0.0)] * max(most, 0)
        asked = params.num_logprobs.tolist()
        top = [ranking(seen)[:most] if n > 0 else unasked for seen, n in zip(self.views, asked, strict=True)]
        logprobs = np.array([-digest(seen, id) / 2**32 for seen, id in zip(self.views, ids, strict=True)], np.float32)
        top_ids = np.array([[id for id, _ in each] for each in top], np.int32).reshape(len(ids), -1)
        top_logprobs = np.array([[p for _, p in each] for each in top], np.float32).reshape(len(ids), -1)
        errors = np.array([len(banned_in(params, row)) == VOCAB for row in range(len(ids))]) * np.uint8(NO_TOKEN)
        mu = np.array(mus, np.float32)
        ranks = np.maximum(params.targets + 1, 0)
        result = Sampled(np.array(ids, np.int32), logprobs, top_ids, top_logprobs, ranks, mu, errors)
        self.sampled = params, result
        return result


class ToyExecutor:
    def __init__(self, windows: Sequence[int | None], num_blocks: Sequence[int], max_tokens: int) -> None:
        self.windows = windows
        self.memory = [np.full((count, BLOCK_TOKENS), -1, np.int32) for count in num_blocks]
        self.max_tokens = max_tokens
        self.steps: list[Batch] = []
        self.fail_next = False

    def submit(self, batch: Batch) -> ToyPending:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the toy broke")
        assert len(batch.ids) <= self.max_tokens
        self.steps.append(batch)
        owners = np.repeat(np.arange(len(batch.seq_starts) - 1), np.diff(batch.seq_starts))
        for group, table in enumerate(batch.tables):
            blocks = table[owners, batch.positions // BLOCK_TOKENS]
            assert (blocks != NULL_BLOCK).all()
            self.memory[group][blocks, batch.positions % BLOCK_TOKENS] = batch.ids
        asked = zip(owners[batch.logit_rows].tolist(), batch.positions[batch.logit_rows].tolist(), strict=True)
        views = [self._views(batch, *each) for each in asked]
        num_drawn = len(views) - batch.num_pooled
        self.pending = ToyPending(views[:num_drawn], views[num_drawn:])
        return self.pending

    def advance(self) -> None:
        assert self.pending.sampled is not None
        params, sampled = self.pending.sampled
        batch = self.steps[-1]
        batch.ids[:] = sampled.ids
        batch.positions[:] += 1
        params.position[:] += 1

    def proceed(self, ends: np.ndarray) -> bytes | None:
        assert self.pending.sampled is not None
        params, sampled = self.pending.sampled
        self.advance()
        for kept, drawn in zip(sampled, self.submit(self.steps[-1]).sample(params), strict=True):
            kept[:] = drawn
        self.pending.sampled = params, sampled
        return None if sampled.errors.any() or np.isin(sampled.ids, ends).any() else sampled.ids.tobytes()

    def _views(self, batch: Batch, sequence: int, position: int) -> tuple[int, ...]:
        views = []
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, position - window + 1)
            first_block, last_block = first // BLOCK_TOKENS, position // BLOCK_TOKENS
            blocks = batch.tables[group][sequence, first_block : last_block + 1]
            assert NULL_BLOCK not in blocks.tolist()
            start = first_block * BLOCK_TOKENS
            seen = self.memory[group][blocks].reshape(-1)[first - start : position + 1 - start]
            assert seen.min() >= 0
            views.append(view(seen))
        return tuple(views)

    def kv_copy(self, group: int, src: int, dst: int, num_tokens: int) -> None:
        self.memory[group][dst, :num_tokens] = self.memory[group][src, :num_tokens]

    def kv_read(self, group: int, blocks: Sequence[int]) -> bytes:
        return self.memory[group][list(blocks)].tobytes()

    def kv_write(self, group: int, blocks: Sequence[int], data: bytes) -> None:
        rows = np.frombuffer(data, self.memory[group].dtype).reshape(len(blocks), BLOCK_TOKENS)
        self.memory[group][list(blocks)] = rows

    def fingerprint(self, digest: str) -> str:
        return f"fingerprint of {digest}"

    def store(self, digest: str, permit: Callable[[], bool]) -> None:
        pass

    def profile(self) -> list[StepProfile]:
        return []

    def close(self) -> None:
        pass


def make_engine(
    *,
    windows: tuple[int | None, ...] = (None,),
    num_blocks: int | tuple[int, ...] = 200,
    swap: int = 0,
    context: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    digest: str | None = "toy",
    prefixes: BoundedFolder | None = None,
    **settings: object,
) -> tuple[Engine, ToyExecutor]:
    config = EngineConfig(**{"max_batch_tokens": 64, "max_sequences": 8, **settings})  # type: ignore[arg-type]
    counts = (num_blocks,) * len(windows) if isinstance(num_blocks, int) else num_blocks
    executor = ToyExecutor(windows, counts, config.max_batch_tokens)
    full = [count for count, window in zip(counts, windows, strict=True) if window is None] or list(counts)
    plan = MemoryBudget(
        weights=0,
        arena=0,
        kv=0,
        num_blocks=counts,
        context=context or (min(full) - 1) * BLOCK_TOKENS,
        swap=swap,
        bytes_per_block=(100,) * len(windows),
    )
    runner = Runner(
        executor,  # type: ignore[arg-type]
        files=(),
        digest=digest,
        windows=windows,
        vocab_size=VOCAB,
        width=WIDTH,
        max_tokens=config.max_batch_tokens,
        max_sequences=min(config.max_sequences, config.max_batch_tokens),
        plan=plan,
    )
    return Engine(runner, config, clock, prefixes=prefixes), executor


def request(
    id: str,
    prompt: Sequence[int],
    *,
    end_ids: tuple[int, ...] = (),
    salt: str = "",
    priority: int = 0,
    tenant: str = "",
    pin_ttl: float = 0,
    pooling: Pooling | None = None,
    **params: object,
) -> EngineRequest:
    sampling = SamplingParams(**{"max_tokens": 8 if pooling is None else 0, "temperature": 0.0, "seed": 1, **params})  # type: ignore[arg-type]
    return EngineRequest(
        id=id,
        prompt_ids=list(prompt),
        sampling=sampling,
        end_ids=end_ids,
        cache_salt=salt,
        priority=priority,
        tenant=tenant,
        pin_ttl=pin_ttl,
        pooling=pooling,
    )


def prompt(length: int, start: int = 0) -> list[int]:
    return [digest(start, i) % VOCAB for i in range(length)]


class Transcript:
    """Events by request, checked against the laws of events."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}
        self._unfold = Unfold()

    def add(self, events: list[StepEvent]) -> None:
        for event in self._unfold(events):
            mine = self.events.setdefault(event.request_id, [])
            assert not mine or not isinstance(mine[-1], Done | ErrorEvent), "an event after the terminal one"
            assert isinstance(event, Accepted | ErrorEvent) == (not mine) or isinstance(event, ErrorEvent)
            mine.append(event)

    def tokens(self, id: str, choice: int = 0) -> list[int]:
        return [e.token_id for e in self.events[id] if isinstance(e, TokenEvent) and e.choice == choice]

    def answers(self, id: str) -> list[Event]:
        """All but the usage, choice by choice: what the exactness law speaks of."""
        scores = [e for e in self.events[id] if isinstance(e, PromptEvent)]
        vectors = [e for e in self.events[id] if isinstance(e, Embedding)]
        told = [e for e in self.events[id] if isinstance(e, TokenEvent | Finish)]
        return [*scores, *vectors, *sorted(told, key=lambda e: e.choice)]

    def last(self, id: str) -> Event:
        return self.events[id][-1]


def run(engine: Engine, requests: Sequence[EngineRequest] = (), transcript: Transcript | None = None) -> Transcript:
    """Run to the end, with the integrity check at every step."""
    transcript = transcript or Transcript()
    for one in requests:
        engine.submit(one)
    while engine.has_work or engine.counters.num_waiting:
        transcript.add(engine.step())
        engine.check()
    for events in transcript.events.values():
        assert isinstance(events[-1], Done | ErrorEvent)
    assert engine.counters.kv_blocks_used == 0 or engine.counters.pins
    return transcript
