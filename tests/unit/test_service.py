from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pelton.errors import ContextLengthExceeded, EngineDied, InvalidRequest, Overloaded, PeltonError
from pelton.prompting import NUM_THREADS, EncodedPrompt, Prompts
from pelton.request import (
    EngineRequest,
    ErrorEvent,
    Event,
    Finish,
    Grammar,
    Message,
    ProcessorCall,
    Request,
    SamplingParams,
    TextDelta,
    TextDone,
    TextEvent,
    TextFinish,
    TokenEvent,
)
from pelton.service import Service
from pelton.text.enforcement import Enforcement
from pelton.text.tokenizer import Tokenizer
from tests.unit.scripted_engine import Script, ScriptedEngine, info, saying
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


def test_priority_tenant_and_salt_reach_the_engine() -> None:
    engine = ScriptedEngine(saying(ids("x")))
    answer(engine, request(prompt="hi", priority=-7, user="ada", cache_salt="mine"))
    answer(engine, request(prompt="hi"))
    assert [(sent.priority, sent.tenant) for sent in engine.requests] == [(-7, "ada"), (0, "")]
    assert [sent.cache_salt for sent in engine.requests] == ["mine", ""]
    with pytest.raises(InvalidRequest, match="priority"):
        answer(engine, request(prompt="hi", priority=1 << 40))


def test_timeouts_reach_the_engine() -> None:
    engine = ScriptedEngine(saying(ids("x")))
    answer(engine, request(prompt="hi", timeout=9.0, queue_timeout=0.5))
    assert (engine.requests[0].timeout, engine.requests[0].queue_timeout) == (9.0, 0.5)
    for bad in ({"timeout": 0.0}, {"timeout": float("nan")}, {"queue_timeout": -1.0}):
        with pytest.raises(InvalidRequest, match="timeout"):
            answer(engine, request(prompt="hi", **bad))


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3),
        ("top_p", 0.5),
        ("stop", ("x",)),
        ("presence_penalty", 1.0),
        ("logit_bias", {5: 1.0}),
        ("temperature", 0.7),
        ("max_tokens", 0),
        ("beam_width", 0),
    ],
)
def test_what_means_nothing_to_a_beam_search_is_refused(field: str, value: Any) -> None:
    engine = ScriptedEngine(saying([5]))
    with pytest.raises(InvalidRequest) as caught:
        answer(engine, sampling(use_beam_search=True, **{field: value}))
    assert caught.value.param == field
    assert engine.requests == []
    answer(engine, sampling(use_beam_search=True, beam_width=4, temperature=0.0))
    assert engine.requests[0].sampling.beam_width == 4


def test_best_of_is_at_least_n() -> None:
    with pytest.raises(InvalidRequest, match="best_of is 1, less than n, which is 2"):
        answer(ScriptedEngine(saying([5])), sampling(n=2, best_of=1))


def test_a_chat_goes_through_the_template() -> None:
    engine = ScriptedEngine(saying(ids("x")))
    answer(engine, request(messages=CHAT))
    sent = engine.requests[0].prompt_ids
    assert [id for id in sent if id < 3] == [1, 2, 1]
    assert tokenizer().decode(sent, skip_special=False).startswith("<|im_start|>user\nHi <|im_end|><|im_end|>\n")
    answer(engine, request(prompt_ids=(5, 6, 1)))
    assert engine.requests[1].prompt_ids == [5, 6, 1]


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


def test_limits_and_seeds() -> None:
    engine = ScriptedEngine(saying(ids("x")), info=info(context=20))
    num_prompt = len(ids("Hello"))
    for given, expected in ((None, 20 - num_prompt), (3, 3), (10**9, 20 - num_prompt)):
        answer(engine, sampling(max_tokens=given, top_k=-1))
        assert engine.requests[-1].sampling.max_tokens == expected
        assert engine.requests[-1].sampling.top_k == 0
    answer(engine, sampling(min_tokens=500))
    assert engine.requests[-1].sampling.min_tokens == 20 - num_prompt
    seeds = {each.sampling.seed for each in engine.requests}
    assert None not in seeds
    assert len(seeds) == len(engine.requests)
    for seed in (0, -5, 2**64 - 1):
        answer(engine, sampling(seed=seed))
        assert engine.requests[-1].sampling.seed == seed


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
    ("field", "value"),
    [
        ("n", 0),
        ("n", 10**9),
        ("best_of", 0),
        ("beam_width", 3),
        ("length_penalty", float("nan")),
        ("best_of", 10**9),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("typical_p", 1.1),
        ("top_n_sigma", -1.5),
        ("top_n_sigma", float("nan")),
        ("xtc_probability", -0.1),
        ("xtc_threshold", 1.1),
        ("mirostat_mode", 1),
        ("mirostat_tau", 0.0),
        ("mirostat_eta", 1.1),
        ("dry_multiplier", -0.1),
        ("dry_base", 0.9),
        ("dry_allowed_length", 0),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", ("",)),
        ("dry_sequence_breakers", ("x",) * 65),
        ("bad_words", ("",)),
        ("bad_words", (" ",)),
        ("bad_words", ("x",) * 1025),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (10**7,)),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("logits_processors", (ProcessorCall(name="x", args={"a": 10**30}),)),
        ("logits_processors", ("x",) * 65),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("seed", 2**64),
        ("logprobs", -1),
        ("logprobs", 21),
        ("stop", ("",)),
        ("stop", ("x" * 2000,)),
        ("stop", ("x",) * 100),
        ("stop_token_ids", (10**7,)),
        ("stop_token_ids", (-1,)),
        ("logit_bias", {10**7: 1.0}),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {i % 400: 1.0 for i in range(5000)} | {400 + i: 0.0 for i in range(5000)}),
    ],
)
def test_parameters_out_of_range(field: str, value: Any) -> None:
    engine = ScriptedEngine(saying([5]))
    with pytest.raises(InvalidRequest) as caught:
        answer(engine, sampling(**{field: value}))
    assert caught.value.param == field
    assert engine.requests == []


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


def test_min_tokens_over_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is 5, must be from 0 to 4"):
        answer(ScriptedEngine(saying([5])), sampling(max_tokens=4, min_tokens=5))


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


def test_a_model_without_a_template_completes_but_does_not_chat() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] = [
        "<|x|>" if t == "<|im_start|>" else t for t in metadata["tokenizer.ggml.tokens"]
    ]
    mute = Service("m", Path("m"), Tokenizer(metadata), metadata, ScriptedEngine(saying([5])))
    with pytest.raises(InvalidRequest, match="use completions"):
        run(mute.generate(request(messages=CHAT)))
    assert run(mute.encode(request(prompt="x")))


def test_what_a_service_says_of_itself() -> None:
    engine = ScriptedEngine(saying([5]), info=info(vocab_size=50, context=77))
    mine = service(engine)
    assert (mine.context, mine.fingerprint, mine.vocab_size) == (77, "scripted", 50)
    with pytest.raises(InvalidRequest, match="from 0 to 49"):
        run(mine.encode(request(prompt_ids=(50,))))
    run(mine.close())
    assert engine.is_closed


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
