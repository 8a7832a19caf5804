"""The law of terminal events: whatever dies, an accepted request ends in one `Done` or error, each of its choices in
one finish before that, and nothing follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pelton import errors
from pelton.config import EngineConfig
from pelton.engine import client
from pelton.engine.client import EngineClient
from pelton.engine.link import LocalLink
from pelton.engine.protocol import EngineInfo, Events, Start
from pelton.request import (
    Accepted,
    Done,
    EngineRequest,
    ErrorEvent,
    Event,
    Finish,
    Request,
    SamplingParams,
    TextDelta,
    TextDone,
    TextEvent,
    TextFinish,
    TokenEvent,
    Usage,
)
from pelton.service import Service
from pelton.text.tokenizer import Tokenizer
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.toy_executor import make_engine, prompt, request
from tests.unit.vocabularies import byte_level

FAULTS = st.sampled_from(["", "", "", "step", "unsound", "die", "garbage"])


def lose_a_block() -> None:
    raise errors.InternalError("a block is lost")


class FaultyLink(LocalLink):
    """The real engine over a toy model. Each step and each restart takes one of `faults`."""

    def __init__(self, faults: Iterator[str], is_first: bool) -> None:
        super().__init__(Start("toy", EngineConfig()))
        self._faults = faults
        self._is_first = is_first

    async def open(self, progress: Callable[[float], None] | None) -> EngineInfo:
        if not self._is_first and next(self._faults, "") == "die":
            raise errors.EngineDied("it does not start")
        self._engine, self._executor = make_engine(max_sequences=3, max_queue=2)
        return self._engine.info

    async def receive(self) -> Events:
        await self._wake.wait()
        await asyncio.sleep(0)
        assert self._engine is not None
        match next(self._faults, ""):
            case "step":
                self._executor.fail_next = True
            case "unsound":  # a step fails, and its blocks cannot be accounted for
                self._executor.fail_next = True
                self._engine.check = lose_a_block  # type: ignore[method-assign]
            case "die":
                raise errors.EngineDied("the engine process ended by SIGKILL")
            case "garbage":
                raise ValueError("no message")
        return await super().receive()


asks = st.builds(
    lambda n, length, max_tokens, ends, late, leaves: (
        {"n": n, "max_tokens": max_tokens, "end_ids": tuple(range(0, 50, 4)) if ends else ()},
        length,
        late,
        leaves,
    ),
    st.integers(1, 4),  # 4 are refused
    st.integers(1, 90),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([None, None, 1, 3, "abort", 0, 1]),
)


def check(events: list[Event], n: int) -> None:
    if isinstance(events[0], ErrorEvent):
        assert len(events) == 1
        return
    assert isinstance(events[0], Accepted)
    assert [type(event) for event in events if isinstance(event, Done | ErrorEvent)] == [type(events[-1])]
    finishes = [event for event in events if isinstance(event, Finish)]
    assert sorted(finish.choice for finish in finishes) == list(range(n))
    ended = set()
    for event in events:
        if isinstance(event, TokenEvent | Finish):
            assert event.choice not in ended
        if isinstance(event, Finish):
            ended.add(event.choice)
    if isinstance(events[-1], Done):
        assert all(finish.reason != "error" for finish in finishes)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(faults=st.lists(FAULTS, max_size=25), asked=st.lists(asks, min_size=1, max_size=6), closes=st.integers(0, 60))
def test_whatever_dies_each_choice_finishes_once_and_each_request_ends_once(faults, asked, closes, monkeypatch):
    monkeypatch.setattr(client, "FIRST_BACKOFF", 0.0)

    async def main() -> None:
        script = iter(faults)
        engine = EngineClient(Path("toy"), EngineConfig(), in_process=True)
        lives = count()
        engine._new_link = lambda: FaultyLink(script, next(lives) == 0)  # type: ignore[method-assign]
        await engine.start()

        async def one(number: int) -> None:
            fields, length, late, leaves = asked[number]
            for _ in range(late):
                await asyncio.sleep(0)
            mine = request(str(number), prompt(length), **fields)
            events: list[Event] = []
            async with aclosing(engine.submit(mine)) as stream:  # type: ignore[type-var]
                async for event in stream:
                    events.append(event)
                    if leaves == "abort":
                        engine.abort(mine.id)
                    elif leaves in (0, 1) and len(events) == 2:
                        engine.abort(mine.id, leaves)
                    elif leaves == 3 and len(events) == leaves:
                        return
            check(events, mine.sampling.n)

        async def close() -> None:
            for _ in range(closes):
                await asyncio.sleep(0)
            await engine.close()

        tasks = [one(number) for number in range(len(asked))]
        await asyncio.gather(*tasks, *([close()] if closes < 50 else []))
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 20))


# --- the same of text


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


class Failing(ScriptedEngine):
    """Sends the events of its script; an exception in it is raised."""

    async def submit(self, asked: EngineRequest) -> AsyncIterator[Event]:
        for event in self.script(asked):
            await asyncio.sleep(0)
            if isinstance(event, Exception):
                raise event
            yield event


words = st.lists(st.tuples(st.integers(0, 2), st.integers(3, 250)), max_size=12)
ENDS: list[Callable[[str], Any]] = [
    lambda id: ErrorEvent(id, "EngineDied", "it died"),
    lambda id: ErrorEvent(id, "NoSuchKind", "?"),
    lambda id: RuntimeError("a bug"),
    lambda id: TokenEvent(id, 0, 5),  # without the logprob that was asked for
    lambda id: TokenEvent(id, 7, 5, -1.0),  # of no choice
    lambda id: TokenEvent(id, 0, 10**9, -1.0),  # no token
]


@settings(max_examples=150, deadline=None)
@given(words=words, finished=st.sets(st.integers(0, 2)), end=st.sampled_from([None, *ENDS]), stop=st.booleans())
def test_whatever_fails_each_choice_of_text_finishes_once(words, finished, end, stop):
    def script(asked: EngineRequest) -> list[Any]:
        ended = finished if end is not None else {0, 1, 2}
        events: list[Any] = [Accepted(asked.id)]
        events += [TokenEvent(asked.id, choice, token, -1.0) for choice, token in words]
        events += [Finish(asked.id, choice, "length") for choice in sorted(ended)]
        return [*events, Done(asked.id, Usage()) if end is None else end(asked.id)]

    got: list[TextEvent] = []

    async def consume() -> None:
        service = Service("m", Path("m.gguf"), tokenizer(), byte_level(), Failing(script))
        sampling = SamplingParams(n=3, logprobs=0, stop=("e", "aa") if stop else ())
        async for event in await service.generate(Request(id="r", model="m", prompt="Hello", sampling=sampling)):
            got.append(event)

    failure = None
    try:
        asyncio.run(consume())
    except Exception as error:
        failure = error
    assert (failure is None) == (end is None) == isinstance(got[-1], TextDone)
    finishes = [event.choice for event in got if isinstance(event, TextFinish)]
    assert sorted(finishes) == [0, 1, 2]
    for choice in range(3):
        mine = [event for event in got if isinstance(event, TextDelta | TextFinish) and event.choice == choice]
        assert isinstance(mine[-1], TextFinish)
