"""The Anthropic dialect: what its answers are, by the unmodified `anthropic` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import anthropic
import httpx2 as httpx
import pytest
from pydantic import BaseModel

from pelton.errors import ContextLengthExceeded, EngineDied, InsufficientMemory, Overloaded, TimedOut
from pelton.request import TextDelta, TextFinish, ToolCallBegin, ToolCallDelta, ToolCallEnd
from tests.server.scripted import serving

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "scripted", "max_tokens": 50, "messages": MESSAGES}
TOOLS = [
    {
        "name": "weather",
        "description": "Of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
EVENTS = (
    TextDelta(choice=0, text="They ask", kind="reasoning"),
    TextDelta(choice=0, text=" twice.", kind="reasoning"),
    TextDelta(choice=0, text="Let me "),
    TextDelta(choice=0, text=""),
    TextDelta(choice=0, text="see."),
    ToolCallBegin(choice=0, index=0, id="call_a", name="weather"),
    ToolCallDelta(choice=0, index=0, arguments='{"city": '),
    ToolCallDelta(choice=0, index=0, arguments='"Oslo"}'),
    ToolCallEnd(choice=0, index=0),
    ToolCallBegin(choice=0, index=1, id="call_b", name="weather"),
    ToolCallDelta(choice=0, index=1, arguments="{}"),
    ToolCallEnd(choice=0, index=1),
    TextFinish(choice=0, reason="tool_calls", warnings=("Look out.",)),
)


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as each:
        yield each


def dumped(message: anthropic.types.Message) -> dict:
    return {name: value for name, value in message.model_dump(exclude_none=True).items() if name != "id"}


def test_a_whole_message(client):
    message = client.messages.create(**CHAT)
    assert message.id.startswith("msg_")
    assert dumped(message) == {
        "type": "message", "role": "assistant", "model": "scripted", "content": [{"type": "text", "text": "Hello 🦙"}],
        "stop_reason": "stop_sequence", "stop_sequence": "END",
        "usage": {
            "input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 3,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens_details": {"thinking_tokens": 0}, "service_tier": "standard",
        },
    }  # fmt: skip
    assert message._request_id


def test_a_streams_events(client):
    with client.messages.create(**CHAT, stream=True) as stream:
        events = list(stream)
    assert [event.type for event in events] == [
        "message_start", "content_block_start", *["content_block_delta"] * 3, "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    started = events[0].message
    assert (started.content, started.stop_reason, started.stop_sequence) == ([], None, None)
    assert started.usage.input_tokens == len("<user>Hi<assistant>")
    assert events[1].content_block.model_dump(exclude_none=True) == {"type": "text", "text": ""}
    assert [event.delta.text for event in events[2:5]] == ["Hel", "lo", " 🦙"]
    assert events[6].delta.stop_reason == "stop_sequence"
    assert events[6].usage.model_dump(exclude_none=True)["cache_read_input_tokens"] == 2


def test_a_stream_on_the_wire(url):
    response = httpx.post(f"{url}/v1/messages", json={**CHAT, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    pieces = [piece.split("\n") for piece in response.text.strip().split("\n\n")]
    assert [piece[0] for piece in pieces][:3] == ["event: message_start", "event: ping", "event: content_block_start"]
    for name, data in pieces:
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")


def test_blocks_of_thoughts_text_and_calls(client, service):
    service.events = EVENTS
    message = client.messages.create(**CHAT, tools=TOOLS)
    thought, text, *calls = message.content
    assert (thought.type, thought.thinking) == ("thinking", "They ask twice.")
    assert thought.signature
    assert (text.type, text.text) == ("text", "Let me see.")
    assert [(call.type, call.id, call.name, call.input) for call in calls] == [
        ("tool_use", "call_a", "weather", {"city": "Oslo"}), ("tool_use", "call_b", "weather", {}),
    ]  # fmt: skip
    assert message.stop_reason == "tool_use"
    assert message.model_extra["warnings"] == ["Look out."]


def test_the_streaming_helper_gives_what_one_piece_is(client, service):
    service.events = EVENTS
    with client.messages.stream(**CHAT, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"text", "thinking", "signature", "input_json"} <= kinds
    whole = client.messages.create(**CHAT, tools=TOOLS)
    expected = dumped(whole)
    del expected["warnings"]  # the helper keeps only what it knows of a message's end
    assert dumped(final) == expected


def test_thoughts_may_be_omitted_and_are_carried_on(client, service):
    service.events = (*EVENTS[:2], TextDelta(choice=0, text="Yes."), TextFinish(choice=0, reason="stop"))
    thinking = {"type": "enabled", "budget_tokens": 20, "display": "omitted"}
    message = client.messages.create(**CHAT, thinking=thinking)
    assert message.content[0].thinking == ""
    with client.messages.stream(**CHAT, thinking=thinking) as stream:
        assert dumped(stream.get_final_message()) == dumped(message)
    client.messages.create(**{**CHAT, "messages": [*MESSAGES, message.to_param(), *MESSAGES]})
    assert service.requests[-1].messages[1].reasoning_content == "They ask twice."


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (TextFinish(choice=0, reason="stop"), ("end_turn", None)),
        (TextFinish(choice=0, reason="stop", stop="\n"), ("stop_sequence", "\n")),
        (TextFinish(choice=0, reason="length"), ("max_tokens", None)),
        (TextFinish(choice=0, reason="tool_calls"), ("tool_use", None)),
        (TextFinish(choice=0, reason="abort"), ("pause_turn", None)),
    ],
)
def test_stop_reasons(client, service, finish, expected):
    service.events = (TextDelta(choice=0, text="x"), finish)
    chat = {**CHAT, "max_tokens": 3}  # what the scripted service counts
    message = client.messages.create(**chat)
    assert (message.stop_reason, message.stop_sequence) == expected
    with client.messages.stream(**chat) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == expected


def test_an_answer_that_the_context_has_cut(client, service):
    service.events = (TextDelta(choice=0, text="x"), TextFinish(choice=0, reason="length"))
    assert client.messages.create(**CHAT).stop_reason == "model_context_window_exceeded"


def test_an_answer_of_nothing(client, service):
    service.events = (TextFinish(choice=0, reason="stop"),)
    assert client.messages.create(**CHAT).content == []
    with client.messages.stream(**CHAT) as stream:
        assert stream.get_final_message().content == []


def test_a_call_that_was_cut(client, service):
    service.events = (*EVENTS[5:7], ToolCallEnd(choice=0, index=0), TextFinish(choice=0, reason="length"))
    message = client.messages.create(**{**CHAT, "max_tokens": 3}, tools=TOOLS)
    assert message.content[0].input == {"INVALID_JSON": '{"city": '}
    assert message.stop_reason == "max_tokens"
    with client.messages.stream(**CHAT, tools=TOOLS) as stream:
        assert stream.get_final_message().content[0].input in ({}, {"city": None})


def test_async_client(url, service):
    service.events = EVENTS

    async def main() -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            message, counted = await asyncio.gather(
                client.messages.create(**CHAT), client.messages.count_tokens(model="scripted", messages=MESSAGES)
            )
            assert message.content[1].text == "Let me see."
            assert counted.input_tokens == len("<user>Hi<assistant>")
            async with client.messages.stream(**CHAT) as stream:
                assert "".join([text async for text in stream.text_stream]) == "Let me see."

    asyncio.run(main())


def test_the_clients_own_loop_over_tools(client, service):
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Of a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        service.events = (TextDelta(choice=0, text="Cold."), TextFinish(choice=0, reason="stop"))
        return "5 degrees"

    service.events = (*EVENTS[2:9], EVENTS[-1])
    last = client.beta.messages.tool_runner(**CHAT, tools=[weather]).until_done()
    assert (asked, last.content[0].text) == (["Oslo"], "Cold.")
    assert [message.role for message in service.requests[1].messages] == ["user", "assistant", "tool"]
    assert service.requests[1].messages[2].tool_call_id == "call_a"
    assert service.requests[1].messages[1].tool_calls == (
        {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
    )


def test_parsed_output(client, service):
    class City(BaseModel):
        name: str

    service.events = (TextDelta(choice=0, text='{"name": "Oslo"}'), TextFinish(choice=0, reason="stop"))
    assert client.messages.parse(**CHAT, output_format=City).parsed_output == City(name="Oslo")
    grammar = service.requests[0].grammar
    assert (grammar.kind, grammar.param) == ("json_schema", "output_config.format.schema")
    assert json.loads(grammar.text)["properties"]["name"]["type"] == "string"


@pytest.mark.parametrize(
    ("error", "kind", "name"),
    [
        (ContextLengthExceeded("too long", param="messages"), anthropic.BadRequestError, "invalid_request_error"),
        (Overloaded("full", retry_after=3), anthropic.InternalServerError, "overloaded_error"),
        (EngineDied("gone"), anthropic.InternalServerError, "overloaded_error"),
        (TimedOut("late"), anthropic.InternalServerError, "timeout_error"),
        (InsufficientMemory("no room"), anthropic.InternalServerError, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_an_answer(client, service, error, kind, name, stream):
    service.refuse = error
    with pytest.raises(kind) as caught:
        client.messages.create(**CHAT, stream=stream)
    assert caught.value.error_code == error.code
    body = caught.value.body
    assert (body["type"], body["error"]["type"], body["error"]["message"]) == ("error", name, str(error))
    assert body["request_id"] == caught.value.request_id
    assert caught.value.status_code == (529 if isinstance(error, Overloaded) else error.status)


def test_an_error_in_the_middle_of_a_stream_ends_it(client, service, url):
    service.fail_after = 2
    with pytest.raises(anthropic.APIStatusError) as caught, client.messages.stream(**CHAT) as stream:
        list(stream)
    assert caught.value.body["error"] == {"type": "api_error", "message": "the engine broke"}
    text = httpx.post(f"{url}/v1/messages", json={**CHAT, "stream": True}).text
    assert text.strip().split("\n\n")[-1].startswith("event: error\ndata: {")
    with pytest.raises(anthropic.InternalServerError):
        client.messages.create(**CHAT)


def test_errors_from_before_the_dialect(url, client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**CHAT, "model": "other"})
    assert caught.value.type == "not_found_error"
    too_large = {**CHAT, "messages": [{"role": "user", "content": "x" * 100_000}]}
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**too_large)
    assert (caught.value.status_code, caught.value.body["error"]["type"]) == (413, "request_too_large")
    response = httpx.get(f"{url}/v1/messages", headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers["request-id"]) == (405, "mine")
    assert response.json()["request_id"] == "mine"
    response = httpx.get(f"{url}/v1/messages/batches")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


def test_keys(service):
    with serving(service, api_key="right") as url:
        for given in ({"api_key": "right"}, {"auth_token": "right"}):
            with anthropic.Anthropic(base_url=url, **given) as client:
                assert client.messages.create(**CHAT).content
        with (
            anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            client.messages.create(**CHAT)
        assert caught.value.type == "authentication_error"


def test_models(client):
    (listed,) = client.models.list()
    assert listed == client.models.retrieve("scripted")
    assert (listed.id, listed.type, listed.display_name, listed.lifecycle) == (
        "scripted",
        "model",
        "scripted",
        "active",
    )
    assert (listed.created_at.timestamp(), listed.max_input_tokens) == (1, 99)
    with pytest.raises(anthropic.NotFoundError, match="no model"):
        client.models.retrieve("other")
