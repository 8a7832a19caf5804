"""A real model and a smaller one of its family that drafts for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pelton.config import EngineConfig
from pelton.engine.client import EngineClient
from pelton.formats import checkpoint
from pelton.request import EngineRequest, SamplingParams, TokenEvent
from pelton.text.tokenizer import Tokenizer
from tests.conftest import MODELS
from tests.models.test_draft_model import load
from tests.models.test_engine_exactness import Answer, alone, ask, run
from tests.server.test_engine_process import collect
from tests.server.test_second_start import peak_of_engines

QUESTIONS = [
    "def fibonacci(n):\n    '''Return the first n Fibonacci numbers.'''\n",
    "Minutes of the meeting on 12 March. Present were",
    "import os\n\n\ndef walk(path):\n",
]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 4])
def test_the_same_answers_from_a_real_pair(depth: int):
    """depth 0: it decides itself."""
    target, draft = (MODELS / f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf" for size in ("1.5b", "0.5b"))
    if not target.is_file() or not draft.is_file():
        pytest.skip("the models are not here")
    tokenizer = Tokenizer(checkpoint.open(target).metadata)
    prompts = [tokenizer.encode(question, add_special=True) for question in QUESTIONS]
    asked = [
        ask("greedy", prompts[0], max_tokens=40),
        ask("drawn", prompts[1], max_tokens=30, temperature=0.8, top_p=0.95, seed=7, n=2),
        ask("penalties", prompts[2], max_tokens=30, repetition_penalty=1.1, frequency_penalty=0.2, temperature=0.5),
    ]
    settings = {"kv_memory": 256 << 20, "context": 1024, "max_batch_tokens": 256}
    expected: dict[str, Answer] = alone(target, asked, **settings)
    engine = load({"itself": target, "draft": draft}, "draft", depth, **settings)
    assert run(engine, asked)[0] == expected
    counters = engine.counters
    assert not depth or counters.accepted_by_model > 0.2 * counters.drafted_by_model > 20
    engine.close()


def test_private_memory_of_both_stays_within_the_plan(smollm2: Path):
    async def body() -> None:
        config = EngineConfig(kv_memory=48 << 20, context=1024, threads=2)
        client = EngineClient(smollm2, config, draft_path=smollm2)
        await client.start()
        params = SamplingParams(max_tokens=12, temperature=0.0, seed=0)
        request = EngineRequest(id="a", prompt_ids=[i % 1000 for i in range(300)], sampling=params)
        tokens = [event for event in await collect(client, request) if isinstance(event, TokenEvent)]
        assert len(tokens) == 12
        info = client.info
        assert info.draft_context == 512  # a quarter of KV memory holds less, but so much it has to
        assert info.weight_bytes > 2 * 90e6
        plan = info.weight_bytes + info.arena_bytes + info.kv_bytes
        assert plan * 0.8 < peak[0] <= plan + (64 << 20)
        await client.close()

    with peak_of_engines() as peak:
        asyncio.run(body())
