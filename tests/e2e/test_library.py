"""`LLM` on the real default model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pelton import LLM, SamplingParams
from pelton.errors import InvalidRequest

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1)


def test_library(smollm2: Path) -> None:
    chat = [{"role": "user", "content": "Say hello."}]
    with LLM(str(smollm2), context=1024) as llm:
        paris, water = llm.generate(["The capital of France is", "Water boils at"], GREEDY)
        assert paris.text.startswith(" Paris.")
        assert (paris.finish_reason, len(paris.token_ids), paris.usage.completion_tokens) == ("length", 12, 12)
        [answer] = llm.chat(chat, SamplingParams(temperature=0))
        assert answer.finish_reason == "stop"
        [cut] = llm.generate("Count: 1 2 3 4", SamplingParams(temperature=0, max_tokens=40, stop=("7",)))
        assert (cut.text, cut.outputs[0].stop) == (" 5 6 ", "7")
        several = SamplingParams(n=3, seed=11, max_tokens=8)
        schema = {"type": "object", "properties": {"capital": {"enum": ["Paris", "Rome"]}}, "required": ["capital"]}
        [typed] = llm.chat(chat, SamplingParams(temperature=0), json_schema=schema)
        assert json.loads(typed.text)["capital"] in ("Paris", "Rome")
        assert typed.finish_reason == "stop"
        with pytest.raises(InvalidRequest, match="uniqueItems"):
            llm.generate("A list:", json_schema={"type": "array", "uniqueItems": True})
        first, again = (llm.generate("Once upon a time", several)[0] for _ in range(2))
        assert first.outputs == again.outputs
        assert len({output.text for output in first.outputs}) > 1
    with LLM(str(smollm2), context=1024, in_process=True) as llm:
        assert [result.outputs for result in llm.generate(["The capital of France is"], GREEDY)] == [paris.outputs]
        assert llm.generate("Water boils at", GREEDY)[0].outputs == water.outputs
        assert llm.chat(chat, SamplingParams(temperature=0))[0].outputs == answer.outputs
        assert llm.chat(chat, SamplingParams(temperature=0), json_schema=schema)[0].outputs == typed.outputs


def test_answers_under_a_schema_are_the_same_with_drafts(smollm2: Path) -> None:
    """Drafts of what the schema forces, with stop strings, penalties, several choices and logprobs."""
    asked = "Ann Lee (sales) met Bob Ray (support). List the people, with name and department."
    person = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "department": {"enum": ["sales", "support"]}},
    }
    person |= {"required": ["name", "department"], "additionalProperties": False}
    schema = {"type": "array", "items": person, "minItems": 2, "maxItems": 3}
    params = [
        SamplingParams(temperature=0, max_tokens=40, logprobs=2),
        SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=30),
        SamplingParams(temperature=0.8, seed=4, max_tokens=60, stop=("partment",)),
        SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1.1, logprobs=0),
    ]
    answers = []
    for speculation in ("off", "auto"):
        with LLM(str(smollm2), context=512, in_process=True, speculation=speculation, kv_memory=64 << 20) as llm:
            chats = [[{"role": "user", "content": asked}]] * len(params)
            answers.append([result.outputs for result in llm.chat(chats, params, json_schema=schema)])
            if speculation == "auto":
                answers.append([llm.chat(chats[0], each, json_schema=schema)[0].outputs for each in params])
            assert (llm._service.engine.counters.accepted > 0) == (speculation == "auto")
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][2][0].stop == "partment"
