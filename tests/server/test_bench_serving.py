"""The load of `pelton bench serve`, against servers whose every answer is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pelton.bench.serving.drive import drive
from pelton.bench.serving.http import Address
from pelton.bench.serving.load import Lengths, Load, Systems
from pelton.bench.serving.result import Objective, Result
from pelton.bench.serving.target import find
from pelton.bench.serving.wire import Endpoint
from pelton.errors import InvalidRequest, Overloaded
from pelton.request import Request, Usage
from tests.server.bench_servers import PER_PROMPT, Answers, Dies, WordService, chunk, raw, words_of
from tests.server.scripted import serving

LOAD = Load(2, None, 5, Lengths(11, 11), Lengths(9, 9), num_warm_up=0)


def driven(service: WordService, load: Load = LOAD, endpoint: Endpoint = "completions", **options: Any) -> Result:
    async def run(url: str) -> Result:
        has_system = load.systems is not None
        return await drive(await find("scripted", Address(url), endpoint, has_system=has_system), load, **options)

    with serving(service) as url:
        return asyncio.run(run(url))


def driven_raw(answers: Answers, load: Load = LOAD, **options: Any) -> Result:
    async def run() -> Result:
        async with raw(answers) as url:
            return await drive(await find("raw", Address(url)), load, **options)

    return asyncio.run(run())


def test_counts_by_usage() -> None:
    service = WordService(words=("one", "", "two"))  # an empty piece makes no chunk that shows, but is a token
    result = driven(service)
    assert (result.num_requests, result.failures, result.num_output_tokens) == (5, {}, 15)
    assert result.tokens_per_second * result.seconds == pytest.approx(15)
    assert (result.num_prompt_tokens, result.num_cached_tokens) == (5 * 11, 5 * 2)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_what_each_request_asks_for(endpoint: Endpoint) -> None:
    service = WordService()
    driven(service, endpoint=endpoint)
    asked = service.measured
    assert [len(words_of(request)) + PER_PROMPT for request in asked] == [11] * 5
    assert len({tuple(words_of(request)) for request in asked}) == 5
    for request in asked:
        assert (request.messages is None) == (endpoint == "completions")
        assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.min_tokens) == (9, 0, 0)
        assert request.sampling.ignore_eos


def test_no_more_at_once_than_asked() -> None:
    service = WordService(delay=0.02)
    result = driven(service)
    assert (service.most_open, result.max_in_flight) == (2, 2)


def test_times() -> None:
    result = driven(WordService(delay=0.05))
    assert result.ttft is not None
    assert result.e2e is not None
    assert result.itl is not None
    assert 0.05 <= result.ttft.median <= result.ttft.p95 <= result.ttft.p99 <= result.e2e.p99
    assert result.ttft.median <= result.e2e.median
    assert result.itl.median < 0.05  # the wait for the first token is no gap between tokens
    assert result.seconds >= 3 * 0.05  # five requests, two at once
    assert 0 < result.client_share < 1


def test_the_warm_up_is_not_counted() -> None:
    service = WordService()
    result = driven(service, replace(LOAD, num_warm_up=4))
    assert (len(service.measured), result.num_requests) == (9, 5)
    assert len({tuple(words_of(request)) for request in service.measured}) == 9


def test_shared_system_prompts_are_sent_once_before() -> None:
    service = WordService()
    load = replace(LOAD, num_requests=12, systems=Systems(2, 20))
    assert driven(service, load, "chat").num_requests == 12
    asked = [tuple(words_of(request)) for request in service.measured]
    assert len(asked) == 2 + 12  # each of two system prompts once, then the load
    assert [len(words) for words in asked] == [20 + 11 - PER_PROMPT] * 14
    assert {words[:20] for words in asked[:2]} == {words[:20] for words in asked[2:]}
    assert len({words[:20] for words in asked}) == 2


def test_what_a_template_says_for_a_missing_system_is_not_counted_with_one() -> None:
    class Templated(WordService):
        def usage(self, request: Request) -> Usage:
            plain, has_system = super().usage(request), request.messages is not None and len(request.messages) == 2
            return msgspec.structs.replace(plain, prompt_tokens=plain.prompt_tokens + (0 if has_system else 15))

    for systems in (None, Systems(2, 20)):
        service = Templated()
        result = driven(service, replace(LOAD, prompt=Lengths(40, 40), systems=systems), "chat")
        assert result.num_prompt_tokens == 5 * (40 + (20 if systems else 0))


def test_own_system_prompts_are_as_long() -> None:
    service = WordService()
    driven(service, replace(LOAD, systems=Systems(2, 20, is_shared=False)))
    asked = [tuple(words_of(request)) for request in service.measured]
    assert [len(words) for words in asked] == [20 + 11 - PER_PROMPT] * 5
    assert len({words[:20] for words in asked}) == 5


def test_arrivals_do_not_wait_for_answers() -> None:
    service = WordService(delay=0.3)
    load = replace(LOAD, concurrency=None, rate=50.0, num_requests=10)
    result = driven(service, load)
    last = load.asks()[-1].arrival
    assert result.max_in_flight > 5
    assert last + 0.3 <= result.seconds < last + 2  # with one after another it would take 3 s


@pytest.mark.parametrize(
    ("service", "message"),
    [
        (WordService(trouble={"refuse": Overloaded("the queue is full")}), "429: "),
        (WordService(trouble={"fail_after": 1}), "the engine broke"),
    ],
    ids=["refused", "broken off"],
)
def test_failures_are_counted_and_give_no_tokens(service: WordService, message: str) -> None:
    result = driven(service, objective=Objective(ttft=60))
    assert result.num_failed == result.num_requests == 5
    assert all(message in failure for failure in result.failures)
    assert (result.tokens_per_second, result.ttft, result.goodput, result.good_share) == (0, None, 0, 0)


def test_an_answer_without_tokens_fails() -> None:
    async def answers(body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield chunk("a" if body["max_tokens"] == 2 else "", "length")
        yield chunk(usage=(1, 2 if body["max_tokens"] == 2 else 0))

    assert driven_raw(answers).failures == {"the answer says no usage, or has no tokens": 5}


def test_a_server_without_usage_is_counted_by_the_length_it_says() -> None:
    async def answers(body: dict[str, Any]) -> AsyncIterator[bytes]:
        assert body["max_tokens"] == 2 or body["min_tokens"] == body["max_tokens"]
        yield chunk("two tokens")
        yield chunk("and more", "length")
        yield b"data: [DONE]\n\n"

    result = driven_raw(answers)
    assert (result.failures, result.num_output_tokens) == ({}, 5 * 9)
    assert result.num_prompt_tokens is None


def test_an_end_before_the_length_is_no_count() -> None:
    async def answers(body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield chunk("a", "stop")

    assert driven_raw(answers).failures == {"the answer says no usage, or has no tokens": 5}


def test_a_server_that_dies_in_the_middle() -> None:
    num_asked = 0

    async def answers(body: dict[str, Any]) -> AsyncIterator[bytes]:
        nonlocal num_asked
        num_asked += 1
        yield chunk("a")
        if num_asked > 3:  # one that asks for usage, and two that are measured
            raise Dies
        yield chunk("b", "length")
        yield chunk(usage=(11, 9))

    result = driven_raw(answers)
    assert result.failures == {"the connection was closed before the answer's end": 3}
    assert result.num_output_tokens == 2 * 9


def test_a_server_that_is_too_slow() -> None:
    async def answers(body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield chunk("a")
        await asyncio.sleep(0 if body["max_tokens"] == 2 else 30)
        yield chunk("b", "length", None)
        yield chunk(usage=(11, 9))

    result = driven_raw(answers, replace(LOAD, concurrency=5), timeout=0.2)
    assert result.failures == {"no answer in 0.2 s": 5}
    assert result.seconds < 5


@pytest.mark.parametrize(("field", "end"), [(b"data: ", b"\n"), (b"data:", b"\r\n")])
def test_chunks_may_be_cut_anywhere_and_hold_many_tokens(field: bytes, end: bytes) -> None:
    stream = b": ping\n\n" + chunk("one two") + chunk("🦙", "length") + chunk(usage=(11, 9)) + b"data: [DONE]\n"
    stream = stream.replace(b"data: ", field).replace(b"\n", end)

    async def answers(body: dict[str, Any]) -> AsyncIterator[bytes]:
        for i in range(0, len(stream), 7):
            yield stream[i : i + 7]

    result = driven_raw(answers)
    assert (result.failures, result.num_output_tokens) == ({}, 45)


def test_an_error_in_a_stream_is_named() -> None:
    async def answers(body: dict[str, Any]) -> AsyncIterator[bytes]:
        if body["max_tokens"] != 2:
            yield b'data: {"error": {"message": "out of memory"}}\n\n'
        yield chunk("a", "length")
        yield chunk(usage=(11, 9))

    assert driven_raw(answers).failures == {"out of memory": 5}


def test_a_chunk_that_is_none() -> None:
    async def answers(body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield chunk("a", "length") if body["max_tokens"] == 2 else b'data: {"choices": 3}\n\n'
        yield chunk(usage=(11, 9))

    (failure,) = driven_raw(answers).failures
    assert failure.startswith("a chunk that is none of OpenAI's API")


def test_a_server_that_is_gone() -> None:
    with pytest.raises(InvalidRequest, match="does not answer as an OpenAI-compatible server"):
        asyncio.run(find("gone", Address("http://127.0.0.1:1")))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:99999", "http://[::1"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is not the address of a server"):
        Address(url)


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.1.2.3", True),
        ("http://localhost:8000", True),
        ("http://[::1]:8000", True),
        ("http://192.168.0.7:8000", False),
        ("https://example.org", False),
    ],
)
def test_which_servers_are_on_this_machine(url: str, is_here: bool) -> None:
    assert Address(url).is_here is is_here


def test_the_key_is_sent() -> None:
    head = Address("http://user@host/base", "secret").head("POST", "/v1/completions", 3).decode()
    assert head.startswith("POST /base/v1/completions HTTP/1.1\r\nHost: host\r\n")
    assert "\r\nAuthorization: Bearer secret\r\n" in head
