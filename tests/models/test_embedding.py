"""Embeddings through the whole engine: equal to Transformers' hidden states, and bit for bit the same alone, batched,
chunked, beside answers, after prefix hits and preempted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pelton.engine.engine import Engine
from pelton.engine.protocol import Unfold
from pelton.formats import checkpoint
from pelton.formats.quants import WeightType
from pelton.models import base
from pelton.ops import reference
from pelton.ops.memory import Memory
from pelton.request import Done, Embedding, EngineRequest, Finish, Pooling, SamplingParams, TokenEvent
from tests import tolerances
from tests.models import convert, replay, stepping, tiny
from tests.models.test_engine_exactness import ask, growing, load, load_smallest

POOLINGS: tuple[Pooling, ...] = ("last", "mean", "cls")
LENGTHS = (1, 2, 31, 32, 33, 64, 90, 300)


def build(case: str, changes: dict[str, object] | None = None) -> torch.nn.Module:
    return tiny.build(case, max_position_embeddings=1024, **(changes or {}))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    convert.write(build(case), path, lambda name, shape: WeightType.F32)
    return path


def texts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(tiny.VOCAB) for _ in range(length)] for length in LENGTHS]


def embed(id: str, prompt: list[int], pooling: Pooling, salt: str = "") -> EngineRequest:
    sampling = SamplingParams(max_tokens=0, seed=0)
    return EngineRequest(id=id, prompt_ids=prompt, sampling=sampling, pooling=pooling, cache_salt=salt)


def everything(salt: str = "") -> list[EngineRequest]:
    return [embed(f"{pooling} {len(text)}", text, pooling, salt) for text in texts() for pooling in POOLINGS]


def run(engine: Engine, requests: list[EngineRequest]) -> tuple[dict[str, bytes], dict[str, int]]:
    """Vectors, and how many tokens of each came from the cache."""
    vectors: dict[str, bytes] = {}
    cached: dict[str, int] = {}
    ends: list[str] = []
    unfold = Unfold()
    for one in requests:
        engine.submit(one)
    while engine.has_work or engine.counters.num_waiting:
        for event in unfold(engine.step()):
            match event:
                case Embedding():
                    vectors[event.request_id] = event.vector
                case Finish(reason="stop"):
                    ends.append(event.request_id)
                case Done(usage=usage):
                    cached[event.request_id] = usage.cached_tokens
                case TokenEvent():
                    assert event.request_id not in vectors
        engine.check()
    asked = {one.id for one in requests if one.pooling is not None}
    assert vectors.keys() == asked
    assert asked <= set(ends)
    assert cached.keys() == {one.id for one in requests}
    assert engine.counters.kv_blocks_used == 0
    return vectors, cached


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[str, bytes]:
    engine = load(path)
    vectors = {id: vector for one in everything() for id, vector in run(engine, [one])[0].items()}
    engine.close()
    return vectors


def pooled(states: np.ndarray, pooling: Pooling) -> np.ndarray:
    return {"last": states[-1], "cls": states[0], "mean": states.astype(np.float64).mean(0)}[pooling]


def test_equal_to_transformers(case: str, expected: dict[str, bytes]):
    model = build(case)
    for text in texts():
        with torch.no_grad():
            states = model.model(torch.tensor([text]), use_cache=False).last_hidden_state[0].numpy()
        for pooling in POOLINGS:
            got = np.frombuffer(expected[f"{pooling} {len(text)}"], "<f4")
            assert stepping.error(got, pooled(states, pooling)) < tolerances.PARITY_REFERENCE * 10


def test_the_mean_is_summed_in_order_of_position(path: Path, expected: dict[str, bytes]):
    """The definition: on the reference, one state after the other in float32."""
    model = base.load(checkpoint.open(path))
    text = texts()[-2]
    memory = Memory(model.config.groups, stepping.num_blocks(model.config.groups, 1, len(text)), "f16")
    tables = stepping.scattered_tables(model.config.groups, 1, len(text))
    batch = stepping.make_batch([text], [(0, 0, len(text))], tables)
    states = model.pool(reference.Ops(batch, memory), reference.bind(model.weights), batch)
    total = states[0].copy()
    for state in states[1:]:
        total += state
    got = np.frombuffer(expected[f"mean {len(text)}"], "<f4")
    assert stepping.error(got, total / np.float32(len(text))) < tolerances.PARITY_REFERENCE * 10


def test_the_plan_of_generation_is_that_of_embeddings_and_the_head(path: Path):
    """So one plan serves both: texts are embedded beside answers, in one pass over the weights."""
    model = base.load(checkpoint.open(path))
    pool, step = replay.record(model.pool, model.weights), replay.record(model.step, model.weights)
    assert step.steps[:-1] == pool.steps
    assert step.steps[-1].op == "logits"
    assert pool.result == step.steps[-1].ins[0]


@pytest.fixture
def engine(request: pytest.FixtureRequest, path: Path) -> Iterator[Engine]:
    engine = load(path, **request.param)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "engine",
    [{}, {"max_batch_tokens": 5}, {"max_batch_tokens": 37, "threads": 3}, {"prefix_cache": True, "threads": 1}],
    indirect=True,
    ids=str,
)
def test_batched_and_chunked_beside_answers(engine: Engine, expected: dict[str, bytes]):
    answers = [ask("answer", texts()[4], max_tokens=40), ask("scored", texts()[5], prompt_logprobs=1)]
    assert run(engine, [*everything(), *answers])[0] == expected
    assert run(engine, [*answers, *reversed(everything())])[0] == expected


def test_answers_beside_embeddings_are_the_same(path: Path):
    def told(requests: list[EngineRequest]) -> list[int]:
        engine, ids = load(path), []
        for one in requests:
            engine.submit(one)
        unfold = Unfold()
        while engine.has_work:
            ids += [event.token_id for event in unfold(engine.step()) if isinstance(event, TokenEvent)]
        engine.close()
        return ids

    alone = told([ask("answer", texts()[4], max_tokens=40)])
    assert len(alone) == 40
    assert told([*everything()[:9], ask("answer", texts()[4], max_tokens=40), *everything()[9:]]) == alone


@pytest.mark.parametrize("engine", [{"prefix_cache": True}], indirect=True)
def test_what_the_cache_may_give(engine: Engine, expected: dict[str, bytes]):
    """The last state needs none before it, the mean all of them."""
    base = texts()[-1]
    run(engine, [ask("before", base, max_tokens=1)])
    vectors, cached = run(engine, [embed(f"{pooling} {len(base)}", base, pooling) for pooling in POOLINGS])
    assert all(vectors[id] == expected[id] for id in vectors)
    assert list(cached.values()) == [len(base) - 1, 0, 0]


@pytest.mark.parametrize("swap_memory", [0, 64 << 20])
def test_preempted(path: Path, expected: dict[str, bytes], swap_memory: int):
    # Without drafts, of which there are more or fewer by how long steps take: all outputs grow side by side.
    settings: dict[str, Any] = {"context": 640, "max_batch_tokens": 64, "prefix_cache": True, "speculation": "off"}
    engine = load_smallest(path, **settings, swap_memory=swap_memory)
    mixed = [each for pair in zip(growing(tiny.VOCAB), reversed(everything()), strict=False) for each in pair]
    rest = list(reversed(everything()))[len(growing(tiny.VOCAB)) :]
    assert run(engine, [*mixed, *rest])[0] == expected
    assert engine.counters.preempted > 0
    engine.close()


@pytest.mark.parametrize("engine", [{"max_batch_tokens": 512}], indirect=True)
def test_short_texts_share_a_step(engine: Engine):
    requests = [embed(str(i), texts()[2], "mean") for i in range(16)]
    run(engine, requests)
    assert engine.counters.steps == 1
    assert engine.counters.prompt_tokens == 16 * len(texts()[2])


@pytest.mark.parametrize("engine", [{"context": 96, "max_batch_tokens": 40}], indirect=True)
def test_a_text_may_fill_the_context(engine: Engine):
    text = [each % tiny.VOCAB for each in range(96)]
    assert len(run(engine, [embed("full", text, "mean")])[0]["full"]) == 4 * engine.info.width
