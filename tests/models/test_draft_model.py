"""Answers with a draft model are those without one, however often and however well it drafts."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from pelton.config import EngineConfig
from pelton.engine import engine as engines
from pelton.engine.draft_policy import DraftPolicy
from pelton.engine.drafting import Drafting, Plan
from pelton.engine.engine import Engine
from pelton.engine.pace import Shape
from pelton.engine.protocol import Start, Vocabulary
from pelton.engine.sequence import Sequence
from pelton.errors import ConfigError, InsufficientMemory
from pelton.formats.quants import WeightType
from pelton.request import EngineRequest, Grammar, SamplingParams
from tests.models import convert, tiny
from tests.models.test_engine_exactness import Answer, alone, ask, growing, mix, run

MEMORY = 32 << 20
DRAFTS = {
    "itself": ("llama", WeightType.Q8_0, {}),  # always right
    "rounded": ("llama", WeightType.Q4_0, {}),  # often right
    "windowed": ("gemma3", WeightType.Q8_0, {"tie_word_embeddings": False}),  # another model: hardly ever right
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, (case, type, changes) in DRAFTS.items():
        model = tiny.build(case, max_position_embeddings=1024, **changes)
        convert.write(model, folder / f"{name}.gguf", lambda name, shape, type=type: type)
    return {name: folder / f"{name}.gguf" for name in DRAFTS}


class Eager(DraftPolicy):
    """Drafts for every sequence in every step, whatever it costs."""

    depth = 3

    def plan(self, shape: Shape, sequences: Iterable[Sequence], lookups: Plan, spare: int) -> Drafting | None:
        self.shadows.turn()
        drafting, left = Drafting(), self._max_tokens
        candidates = [each for sequence in sequences if (each := self._candidate(sequence, spare)) is not None]
        for candidate in candidates:
            sequence, behind = candidate.sequence, candidate.num_behind
            depth = min(self.depth, len(candidate.gains), spare)
            if depth <= 0 or left <= 0 or not self._fits(sequence, 1):
                continue
            shadow = self.shadows.get(sequence)
            assert shadow is not None
            behind = shadow.num_new
            if behind <= left and self.shadows.grow(sequence, behind + depth):
                drafting.chunks[sequence], drafting.depths[sequence] = behind, depth
                spare -= depth
                left -= behind
        for candidate in candidates:  # what is read only comes last
            shadow = self.shadows.get(candidate.sequence)
            if shadow is not None and candidate.sequence not in drafting.chunks:
                num_tokens = min(shadow.num_new - 1, left)
                if num_tokens > 0 and self.shadows.grow(candidate.sequence, num_tokens):
                    drafting.chunks[candidate.sequence] = num_tokens
                    left -= num_tokens
        return drafting if drafting.chunks else None


def load(models: dict[str, Path], draft: str, depth: int = 3, **settings: object) -> Engine:
    defaults = {"kv_memory": MEMORY, "max_batch_tokens": 1024, "max_sequences": 16, "threads": 2, "prefix_cache": False}
    config = EngineConfig(**(defaults | settings))  # type: ignore[arg-type]
    engine = engines.load(Start(str(models["itself"]), config, draft_path=str(models[draft])))
    if depth:
        assert engine._draft_model is not None
        policy = engine._draft_model.policy
        policy.__class__ = Eager
        policy.depth = depth  # type: ignore[attr-defined]
    return engine


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, Answer]:
    return alone(models["itself"], mix(tiny.VOCAB))


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
    "settings", [{}, {"prefix_cache": True}, {"max_batch_tokens": 120, "depth": 5}, {"threads": 1, "depth": 1}], ids=str
)
def test_the_same_answers(models: dict[str, Path], expected: dict[str, Answer], draft: str, settings: dict):
    engine = load(models, draft, **settings)
    for _ in range(2):
        assert run(engine, mix(tiny.VOCAB))[0] == expected
    counters = engine.counters
    assert counters.drafted_by_model > 30
    assert draft != "itself" or counters.accepted_by_model == counters.drafted_by_model
    engine.close()


def test_the_same_answers_where_it_decides_itself(models: dict[str, Path], expected: dict[str, Answer]):
    engine = load(models, "rounded", depth=0)
    assert run(engine, mix(tiny.VOCAB))[0] == expected
    engine.close()


def load_smallest(models: dict[str, Path], draft: str, **settings: object) -> Engine:
    """With as little KV memory as one sequence of the context takes, and its shadow."""
    low, high = 0, MEMORY
    while high - low > 1024:
        middle = (low + high) // 2
        try:
            load(models, draft, kv_memory=middle, **settings).close()
            high = middle
        except InsufficientMemory:
            low = middle
    return load(models, draft, kv_memory=high, **settings)


@pytest.mark.parametrize("draft", ["rounded", "windowed"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted(models: dict[str, Path], draft: str, prefix_cache: bool):
    settings = {"context": 320, "max_batch_tokens": 64, "prefix_cache": prefix_cache}
    engine = load_smallest(models, draft, **settings)
    assert run(engine, growing(tiny.VOCAB))[0] == alone(models["itself"], growing(tiny.VOCAB))
    assert engine.counters.preempted > 0
    assert engine.counters.drafted_by_model > 0
    engine.close()


def test_a_shadow_beyond_what_the_draft_model_holds(models: dict[str, Path]):
    """The windowed one has a context of its own, which the sequence outgrows."""
    engine = load(models, "windowed", kv_memory=MEMORY)
    assert engine._draft_model is not None
    engine._draft_model.policy.shadows.context = 80
    asked = [ask("a", list(range(60)), max_tokens=60)]
    assert run(engine, asked)[0] == alone(models["itself"], asked)
    assert engine.counters.drafted_by_model > 0
    engine.close()


def test_grammars(models: dict[str, Path]):
    """The draft model draws what the grammar allows, and a copy of the matcher goes ahead."""
    tokens = [bytes([i]) for i in range(tiny.VOCAB - 1)] + [b""]
    vocabulary = Vocabulary(tokens=tokens, control_ids=[tiny.VOCAB - 1], end_ids=[tiny.VOCAB - 1])
    grammar = Grammar(kind="regex", text="(ab|[c-f]{2}|[0-9]x)*y", param="grammar")

    def asked(temperature: float) -> EngineRequest:
        sampling = SamplingParams(max_tokens=40, temperature=temperature, seed=3, logprobs=1)
        return EngineRequest(
            id="g", prompt_ids=[5, 6, 7], sampling=sampling, end_ids=(tiny.VOCAB - 1,), grammar=grammar
        )

    answers = []
    for draft in (None, "itself", "rounded"):
        config = EngineConfig(kv_memory=MEMORY, threads=2, speculation="off")
        engine = load(models, draft) if draft else engines.load(Start(str(models["itself"]), config))
        engine.learn(vocabulary)
        answers.append([run(engine, [asked(t), ask("b", list(range(9)))])[0] for t in (0.0, 1.0, 2.0)])
        assert not draft or engine.counters.drafted_by_model > 0
        engine.close()
    assert answers[0] == answers[1] == answers[2]


def test_aborted_and_failed_requests_give_everything_back(models: dict[str, Path]):
    engine = load(models, "rounded", prefix_cache=True)
    assert engine._draft_model is not None
    pool = engine._draft_model.policy.shadows.memory.pools[0]
    rng = random.Random(2)
    for one in growing(tiny.VOCAB):
        engine.submit(one)
    ids = [one.id for one in growing(tiny.VOCAB)]
    for _ in range(12):
        engine.step()
        engine.check()
        engine.abort(ids.pop(rng.randrange(len(ids)))) if len(ids) > 3 else None
        engine.check()
    assert pool.num_used > 0
    engine._fail(RuntimeError("a step broke"))
    engine.check()
    assert pool.num_used == 0
    expected = alone(models["itself"], growing(tiny.VOCAB))
    assert run(engine, growing(tiny.VOCAB))[0] == expected
    engine.close()


def test_a_turn_of_a_conversation_finds_the_last_one_in_the_draft_models_cache(models: dict[str, Path]):
    engine = load(models, "itself", prefix_cache=True)
    first = ask("a", list(range(100)), max_tokens=20)
    (answer,) = run(engine, [first])[0].values()
    tokens = [*range(100), *(event.token_id for event in answer if hasattr(event, "token_id"))]
    shadows = engine._draft_model.policy.shadows  # type: ignore[union-attr]
    computed: list[int] = []
    commit = shadows.memory.commit
    shadows.memory.commit = lambda shadow, n: (computed.append(n), commit(shadow, n))[1]
    run(engine, [ask("b", [*tokens, 3, 4, 5], max_tokens=5)])
    assert computed[0] < 40
    engine.close()


def test_other_vocabularies_are_refused(models: dict[str, Path], tmp_path: Path):
    other = tmp_path / "other.gguf"
    convert.write(tiny.build("llama", vocab_size=140), other, lambda name, shape: WeightType.Q8_0)
    with pytest.raises(ConfigError, match=r"other\.gguf cannot draft for itself\.gguf.*140 tokens, not 131"):
        load({**models, "other": other}, "other")


def test_memory_is_planned_for_both(models: dict[str, Path]):
    memory = 4 << 20
    alone = engines.load(Start(str(models["itself"]), EngineConfig(kv_memory=memory, threads=2)))
    both = load(models, "rounded", max_batch_tokens=512, kv_memory=memory)
    assert both.info.weight_bytes > alone.info.weight_bytes
    assert both.info.arena_bytes > alone.info.arena_bytes
    assert both._draft_model is not None
    assert both._draft_model.runner.plan.kv <= memory // 4
    assert 0.99 * memory < both.info.kv_bytes <= memory
    alone.close()
    both.close()
