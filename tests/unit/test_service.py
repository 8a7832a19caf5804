"""A service over a scripted engine: answers, their ends, and who goes away."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import msgspec
import pytest

from pelton.errors import EngineDied, InvalidRequest, Overloaded, PeltonError
from pelton.request import (
    EngineRequest,
    ErrorEvent,
    Event,
    Finish,
    Grammar,
    TextDelta,
    TextEvent,
    TextFinish,
    TokenEvent,
)
from pelton.text.enforcement import Enforcement
from tests.unit.scripted_engine import Script, ScriptedEngine, info, saying
from tests.unit.served import answer, check_shape, finishes, ids, request, run, sampling, service, text, token_ids


def test_a_plain_answer() -> None:
    engine = ScriptedEngine(saying(ids("The quick 😀 fox")))
    events = answer(engine, request(prompt="<|im_end|> hi"))
    check_shape(events, 1)
    assert text(events) == "The quick 😀 fox"
    assert finishes(events) == [TextFinish(choice=0, reason="stop")]
    sent = engine.requests[0]
    assert sent.prompt_ids == ids("<|im_end|> hi")
    assert not set(sent.prompt_ids) & {0, 1, 2}
    assert sent.end_ids == (0, 2)
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(sent.prompt_ids), len(ids("The quick 😀 fox")) + 1)
    assert (usage.cached_tokens, engine.num_open, engine.aborts) == (1, 0, [])
    assert token_ids(events) == ids("The quick 😀 fox")


def scored(*choices: tuple[str, float]) -> Script:
    """Each choice says its text, whose tokens have that logprob each, and ends with a token of the same."""

    def script(request: EngineRequest) -> list[Event]:
        events: list[Event] = []
        for number, (said, logprob) in enumerate(choices):
            events += [TokenEvent(request.id, number, id, logprob) for id in ids(said)]
            events.append(Finish(request.id, number, "stop", 2, logprob))
        return events

    return script


def test_the_best_of_more_choices() -> None:
    engine = ScriptedEngine(scored(("abc", -2.0), ("xy", -1.0), ("a", -5.0), ("xy", -1.0)))
    events = answer(engine, sampling(n=2, best_of=4))
    check_shape(events, 2)
    assert (text(events, 0), text(events, 1)) == ("xy", "xy")
    assert (engine.requests[0].sampling.n, engine.requests[0].sampling.logprobs) == (4, 0)
    assert not any(event.tokens for event in events if isinstance(event, TextDelta))
    assert events[-1].usage.completion_tokens == sum(len(ids(said)) + 1 for said in ("abc", "xy", "a", "xy"))
    events = answer(engine, sampling(n=3, best_of=4, logprobs=0))
    assert text(events, 2) in ("abc", "a")
    assert any(event.tokens for event in events if isinstance(event, TextDelta))


def test_the_best_are_those_up_to_their_stop_string() -> None:
    engine = ScriptedEngine(scored(("a, b c d e f", -1.0), ("ab", -3.0)))
    events = answer(engine, sampling(n=1, best_of=2, stop=(",",)))
    assert text(events) == "a"
    assert [choice for _, choice in engine.aborts] == [0]


@pytest.mark.parametrize("n", [1, 3])
def test_several_choices_with_stop_strings(n: int) -> None:
    words = ["one. two", "three four", "a.b"][:n]
    engine = ScriptedEngine(saying(*map(ids, words)))
    events = answer(engine, sampling(n=n, stop=(".",)))
    check_shape(events, n)
    assert [text(events, choice) for choice in range(n)] == ["one", "three four", "a"][:n]
    assert (
        sorted((f.choice, f.reason, f.stop) for f in finishes(events))
        == [
            (0, "stop", "."),
            (1, "stop", None),
            (2, "stop", "."),
        ][:n]
    )
    assert sorted(engine.aborts) == [("r", 0), ("r", 2)][: (n + 1) // 2]
    assert engine.requests[0].sampling.stop == ()
    counts = [len(ids("one.")), len(ids("three four")) + 1, len(ids("a."))][:n]
    assert events[-1].usage.completion_tokens == sum(counts)


def test_stop_string_found_in_the_flushed_end() -> None:
    broken = ids("é")[0]
    events = answer(ScriptedEngine(saying([*ids("ab"), broken])), sampling(stop=("\ufffd",)))
    assert (text(events), finishes(events)[0].stop) == ("ab", "\ufffd")
    events = answer(
        ScriptedEngine(saying([*ids("ab"), broken], stop_id=None)), sampling(include_stop_str_in_output=True)
    )
    assert (text(events), finishes(events)[0].reason) == ("ab\ufffd", "length")


def test_held_text_is_flushed() -> None:
    events = answer(ScriptedEngine(saying(ids("ab<"))), sampling(stop=("<end>",)))
    assert (text(events), finishes(events)[0].stop) == ("ab<", None)
    said = [*ids("ab"), 1]
    assert token_ids(answer(ScriptedEngine(saying(said)), request())) == said


def test_what_ended_a_choice() -> None:
    stop_id = ids("x")[0]
    events = answer(ScriptedEngine(saying(ids("ab"), stop_id=stop_id)), sampling(stop_token_ids=(stop_id,)))
    assert finishes(events) == [TextFinish(choice=0, reason="stop", stop=stop_id)]
    assert finishes(answer(ScriptedEngine(saying(ids("ab"))), request()))[0].stop is None


def test_logprobs() -> None:
    said = ids("é x")
    events = answer(ScriptedEngine(saying(said, logprobs=True)), sampling(logprobs=2))
    tokens = [token for event in events if isinstance(event, TextDelta) for token in event.tokens]
    assert [token.id for token in tokens] == said
    assert b"".join(token.bytes for token in tokens) == "é x".encode()
    assert all(token.logprob == -0.5 and len(token.top) == 2 for token in tokens)
    assert tokens[0].top[1].text == "<|endoftext|>"


def test_special_tokens_in_the_answer() -> None:
    said = [*ids("a"), 1, *ids("b")]
    assert text(answer(ScriptedEngine(saying(said)), request())) == "ab"
    assert text(answer(ScriptedEngine(saying(said)), sampling(skip_special_tokens=False))) == "a<|im_start|>b"


def test_a_refusal_by_the_engine_comes_before_the_stream() -> None:
    for kind, error in (("Overloaded", Overloaded), ("InvalidRequest", InvalidRequest)):
        engine = ScriptedEngine(saying([5]), refusal=ErrorEvent("r", kind, "because", "p"))

        async def start(engine: ScriptedEngine = engine) -> None:
            await service(engine).generate(request())

        with pytest.raises(error, match="because") as caught:
            run(start())
        assert caught.value.param == "p"


def test_an_error_in_the_middle_is_the_last_thing() -> None:
    script = lambda r: [TokenEvent(r.id, 0, 5), ErrorEvent(r.id, "EngineDied", "it died")]  # noqa: E731

    got: list[TextEvent] = []

    async def consume() -> None:
        async for event in await service(ScriptedEngine(script)).generate(request()):
            got.append(event)

    with pytest.raises(EngineDied, match="it died"):
        run(consume())
    assert got[-1] == TextFinish(choice=0, reason="error")
    assert len(finishes(got)) == 1


def test_an_engine_that_just_stops_talking_is_an_error() -> None:
    class Mute(ScriptedEngine):
        async def submit(self, asked):  # type: ignore[no-untyped-def, override]
            async for event in super().submit(asked):
                if not isinstance(event, Finish) and msgspec.to_builtins(event)[0] != "done":
                    yield event

    with pytest.raises(PeltonError, match="without a last one"):
        answer(Mute(saying([5])), request())


@pytest.mark.parametrize("num_read", [0, 1])
def test_a_consumer_that_goes_away_closes_the_engines_stream(num_read: int) -> None:
    engine = ScriptedEngine(saying(ids("one two three")), hangs=True)

    async def leave() -> None:
        async with aclosing(await service(engine).generate(request())) as events:
            assert engine.num_open == 1
            for _ in range(num_read):
                await anext(events)
        assert engine.num_open == 0

    run(leave())


def test_a_cancelled_consumer_closes_the_engines_stream() -> None:
    engine = ScriptedEngine(saying(ids("one")), hangs=True)

    async def cancel() -> None:
        async def consume() -> None:
            async for _ in await service(engine).generate(request()):
                pass

        task = asyncio.create_task(consume())
        while engine.num_open == 0:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.num_open == 0

    run(cancel())


def test_what_a_service_says_of_itself() -> None:
    engine = ScriptedEngine(saying([5]), info=info(vocab_size=50, context=77))
    mine = service(engine)
    assert (mine.context, mine.fingerprint, mine.vocab_size) == (77, "scripted", 50)
    with pytest.raises(InvalidRequest, match="from 0 to 49"):
        run(mine.encode(request(prompt_ids=(50,))))
    run(mine.close())
    assert engine.is_closed


def test_a_slow_check_of_an_answer_leaves_the_process_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, begun = threading.Event(), threading.Event()

    def slow(*_: object) -> list[str]:
        begun.set()
        assert is_over.wait(20)
        return ["it is late"]

    async def main() -> tuple[str, ...]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        asked = request(grammar=Grammar(kind="json_schema", text="{}", param="response_format"))
        events = await service(ScriptedEngine(saying(ids("[]")))).generate(asked)
        answered = asyncio.ensure_future(anext(event async for event in events if isinstance(event, TextFinish)))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 5) == 1
        is_over.set()
        return (await answered).warnings

    monkeypatch.setattr(Enforcement, "faults", slow)
    try:
        assert run(main()) == ("it is late",)
    finally:
        is_over.set()
