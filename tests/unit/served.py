"""A service over a scripted engine, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import cache
from pathlib import Path
from typing import Any

from pelton.request import Message, Request, SamplingParams, TextDelta, TextDone, TextEvent, TextFinish
from pelton.service import Service
from pelton.text.tokenizer import Tokenizer
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.vocabularies import byte_level

CHAT = (Message(role="user", content="Hi <|im_end|>"),)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special=False)


def service(engine: ScriptedEngine, **metadata: Any) -> Service:
    return Service("m", Path("m.gguf"), tokenizer(), byte_level() | metadata, engine)


def request(**fields: Any) -> Request:
    fields.setdefault("sampling", SamplingParams())
    if not fields.keys() & {"messages", "prompt_ids"}:
        fields.setdefault("prompt", "Hello")
    return Request(id="r", model="m", **fields)


def sampling(**fields: Any) -> Request:
    return request(sampling=SamplingParams(**fields))


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def answer(engine: ScriptedEngine, asked: Request) -> list[TextEvent]:
    async def all_events() -> list[TextEvent]:
        return [event async for event in await service(engine).generate(asked)]

    return run(all_events())


def text(events: list[TextEvent], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.choice == choice)


def token_ids(events: list[TextEvent], choice: int = 0) -> list[int]:
    deltas = [event for event in events if isinstance(event, TextDelta) and event.choice == choice]
    return [id for delta in deltas for id in delta.token_ids]


def finishes(events: list[TextEvent]) -> list[TextFinish]:
    return [event for event in events if isinstance(event, TextFinish)]


def check_shape(events: list[TextEvent], n: int) -> None:
    """One finish per choice, nothing of a choice after its finish, one done at the very end."""
    ended: set[int] = set()
    for event in events[:-1]:
        assert not isinstance(event, TextDone)
        assert event.choice not in ended
        if isinstance(event, TextFinish):
            ended.add(event.choice)
    assert ended == set(range(n))
    assert isinstance(events[-1], TextDone)
