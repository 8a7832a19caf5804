"""The exactness law, through the whole engine, with `==` on tokens and logprobs:
alone = batched = chunked = cached = preempted = speculated = on any number of threads."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pelton.config import EngineConfig
from pelton.engine import engine as engines
from pelton.engine.engine import Engine
from pelton.engine.protocol import Start, Unfold, Vocabulary
from pelton.errors import InsufficientMemory
from pelton.formats.bounded_folder import BoundedFolder
from pelton.formats.quants import WeightType
from pelton.ops.data import I32
from pelton.request import (
    Done,
    EngineRequest,
    Event,
    Finish,
    Grammar,
    PromptEvent,
    SamplingParams,
    Thinking,
    TokenEvent,
    Usage,
)
from tests.models import convert, tiny

CASES = {
    "llama": ("llama", {}),
    "gemma3": ("gemma3", {}),  # a window of 20, shorter than a block
    "gemma3-wide": ("gemma3", {"sliding_window": 100}),
}
MEMORY = 32 << 20
Answer = list[PromptEvent | TokenEvent | Finish]


@pytest.fixture(scope="module", params=list(CASES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case, changes = CASES[request.param]
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    convert.write(tiny.build(case, max_position_embeddings=1024, **changes), path, lambda name, shape: WeightType.Q8_0)
    return path


def load(path: Path, **settings: object) -> Engine:
    defaults = {"kv_memory": MEMORY, "max_batch_tokens": 1024, "max_sequences": 16, "threads": 2, "prefix_cache": False}
    return engines.load(Start(str(path), EngineConfig(**(defaults | settings))))  # type: ignore[arg-type]


def ask(id: str, prompt: list[int], **sampling: object) -> EngineRequest:
    defaults = {"max_tokens": 8, "temperature": 0.0, "seed": 1, "logprobs": 2}
    return EngineRequest(id=id, prompt_ids=prompt, sampling=SamplingParams(**(defaults | sampling)))  # type: ignore[arg-type]


def run(engine: Engine, requests: list[EngineRequest]) -> tuple[dict[str, Answer], dict[str, Usage]]:
    """What each request was told, choice by choice, and its usage."""
    told: dict[str, list[Event]] = {one.id: [] for one in requests}
    for one in requests:
        engine.submit(one)
    unfold = Unfold()
    while engine.has_work or engine.counters.num_waiting:
        for event in unfold(engine.step()):
            told[event.request_id].append(event)
        engine.check()
    usages: dict[str, Usage] = {}
    for id, events in told.items():
        assert isinstance(events[-1], Done), events[-1]
        usages[id] = events[-1].usage
    answers = {
        id: [e for e in events if isinstance(e, PromptEvent)]
        + sorted((e for e in events if isinstance(e, TokenEvent | Finish)), key=lambda e: e.choice)
        for id, events in told.items()
    }
    return answers, usages


def alone(path: Path, requests: list[EngineRequest], **settings: object) -> dict[str, Answer]:
    engine = load(path, **{"speculation": "off"} | settings)
    answers: dict[str, Answer] = {}
    for one in requests:
        answers |= run(engine, [one])[0]
    engine.close()
    return answers


def mix(vocab: int) -> list[EngineRequest]:
    """Requests of all kinds, prompts of over 512 tokens among them."""
    rng = random.Random(3)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(length)]

    return [
        ask("long", prompt(600), max_tokens=12),
        ask("long seeded", prompt(530), temperature=1.0, seed=11),
        ask("one", prompt(1), max_tokens=40),
        ask("block", prompt(32), temperature=0.7, top_p=0.9, seed=5),
        ask("choices", prompt(77), n=3, temperature=1.0, seed=9),
        ask(
            "penalties", prompt(64), repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, max_tokens=40
        ),
        ask("biased", prompt(100), logit_bias={7: 3.0, 9: -5.0}, min_p=0.05, temperature=1.2, top_k=20, seed=2),
        ask("min", prompt(45), min_tokens=5, stop_token_ids=tuple(range(0, vocab, 3)), max_tokens=20),
        ask("scored", prompt(110), prompt_logprobs=2, n=2, temperature=1.0),
        ask("filters", prompt(40), typical_p=0.8, top_n_sigma=2.0, xtc_probability=0.5, temperature=1.3, seed=4),
        ask("mirostat", prompt(50), mirostat_mode=2, mirostat_tau=3.0, temperature=1.0, n=2, max_tokens=30),
        ask("dry", prompt(20) * 3, dry_multiplier=2.0, allowed_token_ids=tuple(range(0, vocab, 2)), max_tokens=20),
    ]


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Answer]:
    return alone(model, mix(tiny.VOCAB))


@pytest.fixture
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    engine = load(model, **request.param)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"prefix_cache": True},
        {"max_batch_tokens": 5},
        {"max_batch_tokens": 37},
        {"threads": 1},
        {"threads": 3},
        {"threads": 5, "max_batch_tokens": 200},
    ],
    indirect=True,
    ids=str,
)
def test_batched_and_chunked_on_any_number_of_threads(engine: Engine, expected: dict[str, Answer]):
    assert run(engine, mix(tiny.VOCAB))[0] == expected


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_streams_that_are_told_tokens_alone(model: Path, threads: int):
    """Greedy and seeded streams in turn, of which one ends after the other: as those that are told logprobs, whose
    steps are made in another way."""
    rng = random.Random(7)
    prompts = [[rng.randrange(tiny.VOCAB) for _ in range(1 + i % 40)] for i in range(12)]
    asked = [
        ask(str(i), prompt, max_tokens=4 + 3 * i, temperature=i % 2, seed=i, logprobs=None)
        for i, prompt in enumerate(prompts)
    ]
    engine = load(model, threads=threads, speculation="off")
    sizes: set[int] = set()
    proceed = engine.runner.proceed

    def proceeded(ends: I32) -> bytes | None:
        drawn = proceed(ends)
        sizes.add(0 if drawn is None else len(drawn) // 4)
        return drawn

    engine.runner.proceed = proceeded  # type: ignore[method-assign]
    answers = run(engine, asked)[0]
    assert len(sizes) > 6  # steps of other sizes were computed as any
    for one in asked[::3]:
        more = msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, logprobs=0))
        assert tokens_of(run(engine, [more])[0][one.id]) == tokens_of(answers[one.id])
    engine.close()


def tokens_of(answer: Answer) -> list[int]:
    assert isinstance(answer[-1], Finish)
    return [event.token_id for event in answer if isinstance(event, TokenEvent)]


def load_smallest(path: Path, **settings: object) -> Engine:
    """With as little KV memory as one sequence of the context takes."""
    low, high = 0, MEMORY
    while high - low > 1024:
        middle = (low + high) // 2
        try:
            load(path, kv_memory=middle, **settings).close()
            high = middle
        except InsufficientMemory:
            low = middle
    return load(path, kv_memory=high, **settings)


def growing(vocab: int) -> list[EngineRequest]:
    """Requests whose prompts fit side by side where their outputs do not."""
    rng = random.Random(4)
    prompts = [[rng.randrange(vocab) for _ in range(60)] for _ in range(8)]
    return [
        ask(str(i), prompt, max_tokens=90, temperature=i % 2, seed=i, repetition_penalty=1 + i % 3 / 10, n=1 + i // 7)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("swap_memory", [0, 64 << 20])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted(model: Path, prefix_cache: bool, swap_memory: int):
    engine = load_smallest(model, context=640, max_batch_tokens=64, prefix_cache=prefix_cache, swap_memory=swap_memory)
    assert run(engine, growing(tiny.VOCAB))[0] == alone(model, growing(tiny.VOCAB))
    assert engine.counters.preempted > 0
    assert (engine.counters.swapped > 0) == (swap_memory > 0)
    engine.close()


def test_beam_search_beside_others(model: Path):
    """The search is the same alone and in a batch that is short of memory."""
    search = ask("beams", list(range(3, 60)), n=2, use_beam_search=True, beam_width=4, max_tokens=20, min_tokens=8)
    engine = load(model)
    expected = run(engine, [search])[0]["beams"]
    engine.close()
    engine = load_smallest(model, context=640, max_batch_tokens=64)
    assert run(engine, [*growing(tiny.VOCAB), search])[0]["beams"] == expected
    engine.close()
    assert sum(isinstance(event, Finish) for event in expected) == 2


def test_after_a_prefix_hit_of_every_length(model: Path):
    rng = random.Random(8)
    base = [rng.randrange(tiny.VOCAB) for _ in range(90)]
    asked = [
        ask(str(length), [*base[:length], (base[length] + 1) % tiny.VOCAB, *base[:5]], max_tokens=3)
        for length in range(1, 65)
    ]
    expected = alone(model, asked)
    engine = load(model, prefix_cache=True)
    is_windowed = any(engine.memory.windows)
    for length, one in enumerate(asked, 1):
        salt = str(length)  # so that each meets the base alone
        run(
            engine,
            [EngineRequest(id="base", prompt_ids=base, sampling=SamplingParams(max_tokens=1, seed=1), cache_salt=salt)],
        )
        warm = EngineRequest(id=one.id, prompt_ids=one.prompt_ids, sampling=one.sampling, cache_salt=salt)
        answers, usages = run(engine, [warm])
        assert answers[one.id] == expected[one.id]
        assert usages[one.id].cached_tokens == length or (is_windowed and usages[one.id].cached_tokens <= length)
    engine.close()


def test_after_a_hit_of_the_whole_prompt(model: Path, expected: dict[str, Answer]):
    engine = load(model, prefix_cache=True)
    run(engine, mix(tiny.VOCAB))
    answers, usages = run(engine, mix(tiny.VOCAB))
    assert answers == expected
    for one in mix(tiny.VOCAB):
        is_scored = one.sampling.prompt_logprobs is not None
        assert usages[one.id].cached_tokens == (0 if is_scored else len(one.prompt_ids) - 1)
    engine.close()


def copying(vocab: int) -> list[EngineRequest]:
    """Requests with the same piece of text again and again, which are likely to go on with it."""
    rng = random.Random(6)
    prompt = [rng.randrange(vocab) for _ in range(30)] * 4
    return [
        ask("greedy", prompt, max_tokens=60),
        ask("warm", prompt, max_tokens=50, temperature=0.5, seed=4),
        ask("choices", prompt, max_tokens=30, n=2, temperature=0.7, top_k=5, seed=2),
        ask("repetition", prompt, max_tokens=40, repetition_penalty=1.05, presence_penalty=0.1),
        ask("biased", prompt, max_tokens=30, logit_bias={prompt[5]: -100.0}),
        ask("stopped", prompt, max_tokens=60, stop_token_ids=(prompt[12],), min_tokens=20),
        ask("mirostat", prompt, max_tokens=30, mirostat_mode=2, mirostat_tau=2.0, temperature=0.7),
        ask("dry", prompt, max_tokens=30, dry_multiplier=0.1),
    ]


@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 20}, {"threads": 3, "prefix_cache": True}], ids=str)
def test_speculated(model: Path, settings: dict[str, int]):
    expected = alone(model, copying(tiny.VOCAB))
    engine = load(model, **settings)
    assert run(engine, copying(tiny.VOCAB))[0] == expected
    answers = {id: answer for one in copying(tiny.VOCAB) for id, answer in run(engine, [one])[0].items()}
    assert answers == expected
    engine.close()


def under_grammars() -> list[EngineRequest]:
    """Requests with grammars that force much of their answers, and others in their company."""
    items = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 4}, "state": {"enum": ["ready", "read only"]}},
            "required": ["name", "state"],
            "additionalProperties": False,
        },
        "minItems": 2,
        "maxItems": 3,
    }
    schema = Grammar(kind="json_schema", text=json.dumps(items), param="response_format")
    regex = Grammar(kind="regex", text="the name is [a-z]{2,4}, and the other name is [a-z]{2,4}!", param="regex")
    thinking = Thinking(open="<t>", close="</t>", is_open=True, budget=6)

    def one(id: str, grammar: Grammar, thinking: Thinking | None = None, **sampling: object) -> EngineRequest:
        asked = ask(id, [5, 6, 7, 8] * 6, **({"max_tokens": 90} | sampling))
        return msgspec.structs.replace(asked, grammar=grammar, thinking=thinking, end_ids=(tiny.VOCAB - 1,))

    warm: dict[str, Any] = {"temperature": 0.8, "seed": 7}
    return [
        one("schema", schema),
        one("schema, warm", schema, **warm, n=2),
        one("regex", regex),
        one("regex, warm", regex, **warm, n=3),
        one("penalties", schema, **warm, repetition_penalty=1.2, frequency_penalty=0.4, top_p=0.9),
        one("stopped", regex, stop_token_ids=(ord(","),), logprobs=5),
        one("cut", regex, max_tokens=20, **warm),
        one("thoughts", schema, thinking, **warm),
        one("thoughts, greedy", regex, thinking),
        *copying(tiny.VOCAB)[:3],
    ]


def test_speculated_under_grammars(model: Path):
    tokens = [*(bytes([byte]) for byte in range(128)), b'{"', b'":', b""]
    assert len(tokens) == tiny.VOCAB
    vocabulary = Vocabulary(tokens=tokens, control_ids=[tiny.VOCAB - 1], end_ids=[tiny.VOCAB - 1])
    plain, engine = load(model, speculation="off"), load(model)
    for each in (plain, engine):
        each.learn(vocabulary)
    expected = {id: answer for one in under_grammars() for id, answer in run(plain, [one])[0].items()}
    assert {id: answer for one in under_grammars() for id, answer in run(engine, [one])[0].items()} == expected
    assert engine.counters.accepted > 0
    assert run(engine, under_grammars())[0] == expected
    plain.close()
    engine.close()


def load_with_disk(path: Path, folder: BoundedFolder, **settings: object) -> Engine:
    config = EngineConfig(**({"kv_memory": MEMORY, "threads": 2} | settings))  # type: ignore[arg-type]
    engine = engines.load(Start(str(path), config, prefixes=folder))
    engine.runner.digest = "the model's"
    engine._open_tier()
    return engine


def wait_for_files(folder: BoundedFolder, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(folder.names("")) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_from_disk_in_another_life(model: Path, expected: dict[str, Answer], tmp_path: Path):
    folder = BoundedFolder(str(tmp_path), 10**9, "prefix")

    engine = load_with_disk(model, folder)
    assert run(engine, mix(tiny.VOCAB))[0] == expected
    wait_for_files(folder, 2)  # of the two long prompts
    engine.close()
    engine = load_with_disk(model, folder)
    answers, usages = run(engine, mix(tiny.VOCAB))
    assert answers == expected
    assert (usages["long"].cached_tokens, usages["long seeded"].cached_tokens) == (576, 512)
    engine.close()


@pytest.mark.parametrize("kv_dtype", ["int8", "f32"])
def test_other_types_of_keys_and_values(model: Path, expected: dict[str, Answer], kv_dtype: str, tmp_path: Path):
    """Batched, cut into chunks, drafted, cached, copied to host memory and back, and read from disk: each
    type has the answers that it has alone."""
    asked = [one for one in mix(tiny.VOCAB) if one.id in ("long", "choices", "penalties", "scored")]
    own = alone(model, asked, kv_dtype=kv_dtype)
    assert own["long"] != expected["long"]
    engine = load(model, kv_dtype=kv_dtype, max_batch_tokens=50, prefix_cache=True)
    for _ in range(2):  # the second time they are cached
        assert run(engine, asked)[0] == own
    engine.close()
    engine = load_smallest(model, kv_dtype=kv_dtype, context=320, max_batch_tokens=64, swap_memory=64 << 20)
    assert run(engine, growing(tiny.VOCAB))[0] == alone(model, growing(tiny.VOCAB), kv_dtype=kv_dtype)
    assert engine.counters.swapped > 0
    engine.close()
    folder = BoundedFolder(str(tmp_path), 10**9, "prefix")
    for life in range(2):
        engine = load_with_disk(model, folder, kv_dtype=kv_dtype)
        answers, usages = run(engine, asked[:1])
        assert answers["long"] == own["long"]
        assert usages["long"].cached_tokens == 576 * life
        wait_for_files(folder, 1)
        engine.close()


SMOLLM2_VOCAB = 49152


@pytest.fixture(scope="module")
def smollm2_expected(smollm2: Path) -> dict[str, Answer]:
    return alone(smollm2, mix(SMOLLM2_VOCAB), kv_memory=256 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_cache": True},
        {"max_batch_tokens": 5},
        {"max_batch_tokens": 37},
        {"threads": 1},
        {"threads": 3},
        {"threads": 5},
    ],
    ids=str,
)
def test_smollm2(smollm2: Path, smollm2_expected: dict[str, Answer], settings: dict[str, int]):
    engine = load(smollm2, kv_memory=256 << 20, **settings)
    assert run(engine, mix(SMOLLM2_VOCAB))[0] == smollm2_expected
    engine.close()


@pytest.mark.slow
def test_smollm2_preempted(smollm2: Path):
    engine = load(smollm2, kv_memory=16 << 20, context=640, max_batch_tokens=64)
    expected = alone(smollm2, growing(SMOLLM2_VOCAB), kv_memory=256 << 20)
    assert run(engine, growing(SMOLLM2_VOCAB))[0] == expected
    assert engine.counters.preempted > 0
    engine.close()


def test_smollm2_long_prompt_mixed_and_cached(smollm2: Path):
    """The short form of the tests above: a long prompt whole and alone, then chunked beside others, then cached."""
    long, seeded, *others = [one for one in mix(SMOLLM2_VOCAB) if one.id in ("long", "choices", "one")]
    expected = alone(smollm2, [long], kv_memory=256 << 20)
    engine = load(smollm2, kv_memory=256 << 20, max_batch_tokens=100, prefix_cache=True)
    assert run(engine, [seeded, long, *others])[0]["long"] == expected["long"]
    warm, usages = run(engine, [long])
    assert warm == expected
    assert usages["long"].cached_tokens == 599
    engine.close()


def test_smollm2_speculated(smollm2: Path):
    greedy, *others = [one for one in copying(SMOLLM2_VOCAB) if one.id in ("greedy", "choices", "stopped")]
    expected = alone(smollm2, [greedy, *others], kv_memory=256 << 20)
    engine = load(smollm2, kv_memory=256 << 20)
    assert run(engine, [greedy])[0]["greedy"] == expected["greedy"]
    assert engine.counters.accepted > 20
    answers, usages = run(engine, [greedy, *others])
    assert answers == expected
    assert usages["greedy"].completion_tokens == 60
    engine.close()
