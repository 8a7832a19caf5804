"""A service's prompts: what becomes one, what is refused, and whose threads make it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from pelton.errors import ContextLengthExceeded, InvalidRequest
from pelton.prompting import NUM_THREADS, EncodedPrompt, Prompts
from pelton.request import Message, Request
from pelton.service import Service
from pelton.text.tokenizer import Tokenizer
from tests.unit.scripted_engine import ScriptedEngine, info, saying
from tests.unit.served import CHAT, answer, ids, request, run, service, tokenizer
from tests.unit.vocabularies import byte_level


def test_a_chat_goes_through_the_template() -> None:
    engine = ScriptedEngine(saying(ids("x")))
    answer(engine, request(messages=CHAT))
    sent = engine.requests[0].prompt_ids
    assert [id for id in sent if id < 3] == [1, 2, 1]
    assert tokenizer().decode(sent, skip_special=False).startswith("<|im_start|>user\nHi <|im_end|><|im_end|>\n")
    answer(engine, request(prompt_ids=(5, 6, 1)))
    assert engine.requests[1].prompt_ids == [5, 6, 1]


def test_a_prompt_that_does_not_fit() -> None:
    long = request(prompt_ids=(5,) * 20)
    with pytest.raises(ContextLengthExceeded, match=r"20 tokens.* 20 tokens"):
        answer(ScriptedEngine(saying([5]), info=info(context=20)), long)
    answer(ScriptedEngine(saying([5]), info=info(context=21)), long)


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = Tokenizer._encode_pieces
    monkeypatch.setattr(
        Tokenizer, "_encode_pieces", lambda self, texts: encoded.extend(map(len, texts)) or encode(self, texts)
    )
    engine = ScriptedEngine(saying([5]), info=info(context=20))
    longest = tokenizer().max_token_length
    at_least = r"at least 2\d tokens.* 20 tokens"
    for content, says in (("x" * (20 * longest), at_least), ("x" * (20 * longest + 1), rf"{20 * longest + 1} char")):
        with pytest.raises(ContextLengthExceeded, match=at_least):
            answer(engine, request(prompt=content))
        with pytest.raises(ContextLengthExceeded, match=says):
            answer(engine, request(messages=(Message(role="user", content=content),)))
    assert encoded == []
    with pytest.raises(ContextLengthExceeded, match=rf"has {3 * 19 * longest} tokens"):
        answer(engine, request(prompt="\N{SNOWMAN}" * (19 * longest)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt_ids": (10**7,)}, "token id 10000000"),
        ({"prompt_ids": ()}, "empty"),
        ({"prompt": "x", "prompt_ids": (1,)}, "exactly one"),
        ({"messages": ()}, "messages is empty"),
        ({"messages": (Message(role="user"),)}, r"messages\[0\]"),
    ],
)
def test_prompts_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        answer(ScriptedEngine(saying([5])), request(**fields))
    with pytest.raises(InvalidRequest, match="exactly one"):
        answer(ScriptedEngine(saying([5])), Request(id="r", model="m"))


def test_a_model_without_a_template_completes_but_does_not_chat() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] = [
        "<|x|>" if t == "<|im_start|>" else t for t in metadata["tokenizer.ggml.tokens"]
    ]
    mute = Service("m", Path("m"), Tokenizer(metadata), metadata, ScriptedEngine(saying([5])))
    with pytest.raises(InvalidRequest, match="use completions"):
        run(mute.generate(request(messages=CHAT)))
    assert run(mute.encode(request(prompt="x")))


def test_a_prompt_that_is_prepared_is_made_once_as_long_as_it_is_held(monkeypatch):
    engine = ScriptedEngine(saying(ids("x")))
    own, asked, made = service(engine), request(prompt="Hello"), []
    make = own._prompts._make
    monkeypatch.setattr(own._prompts, "_make", lambda each: made.append(each) or make(each))

    async def twice() -> None:
        for _ in range(2):
            prepared = await own.prepare(asked)
            async for _ in await own.generate(asked):
                pass
            assert engine.requests[-1].prompt_ids == prepared.ids == ids("Hello")
            del prepared

    run(twice())
    assert len(made) == 2
    assert not own._prepared


def test_templates_that_nobody_waits_for_any_more_leave_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, begun = threading.Event(), threading.Semaphore(0)
    make = Prompts._make

    def slow(self: Prompts, asked: Request) -> EncodedPrompt:
        if asked.chat_template is not None:
            begun.release()
            assert is_over.wait(20)
        return make(self, asked)

    async def main() -> None:
        served = service(ScriptedEngine(saying(ids("x"))))
        own = request(messages=CHAT, chat_template="{{ messages[0].content }}")
        for _ in range(NUM_THREADS // 2):
            gone = asyncio.ensure_future(served.encode(own))
            assert await asyncio.to_thread(begun.acquire, timeout=20)
            gone.cancel()
            await asyncio.wait([gone])
        waiting = [asyncio.ensure_future(served.encode(own)) for _ in range(NUM_THREADS)]
        assert await served.encode(request()) == ids("Hello")
        assert not begun.acquire(blocking=False)
        is_over.set()
        await asyncio.gather(*waiting)

    monkeypatch.setattr(Prompts, "_make", slow)
    try:
        run(main())
    finally:
        is_over.set()
