"""The Anthropic dialect: what of a request reaches the service, what is kept of its prompt, and what is refused."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import anthropic
import httpx2 as httpx
import msgspec
import pytest

from pelton.errors import Overloaded
from pelton.request import Tool, ToolChoice
from pelton.server.keys import KeyStore
from pelton.server.store import Store
from tests.server.scripted import ScriptedService, serving

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "scripted", "max_tokens": 50, "messages": MESSAGES}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as each:
        yield each


def text(words: str, **fields: object) -> dict:
    return {"type": "text", "text": words, **fields}


def result(id: str, **fields: object) -> dict:
    return {"type": "tool_result", "tool_use_id": id, **fields}


def use(id: str, name: str = "weather", **fields: object) -> dict:
    return {"type": "tool_use", "id": id, "name": name, "input": fields}


def test_parameters(client, service):
    client.messages.create(
        **CHAT,
        stop_sequences=["END", "STOP"],
        metadata={"user_id": "ada"},
        service_tier="auto",
        thinking={"type": "enabled", "budget_tokens": 7},
        output_config={"effort": "low"},
        tools=[WEATHER, {"name": "now", "type": "custom", "input_schema": {"type": "object"}, "strict": True}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        extra_body={
            "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 3, "priority": -3, "timeout": 60,
            "queue_timeout": 2.5, "cache_salt": "mine",
        },
    )  # fmt: skip
    (request,) = service.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.stop, sampling.seed) == (50, ("END", "STOP"), 3)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 4)
    assert (request.user, request.priority, request.timeout, request.queue_timeout) == ("ada", -3, 60, 2.5)
    assert request.cache_salt == "mine"
    assert (request.thinking, request.reasoning_budget, request.reasoning_effort) == (True, 7, "low")
    assert request.tools == (
        Tool(name="weather", description="Of a city.", parameters=SCHEMA),
        Tool(name="now", parameters={"type": "object"}, strict=True),
    )
    assert (request.tool_choice, request.parallel_tool_calls) == (ToolChoice(), False)
    assert (request.add_generation_prompt, request.continue_final_message) == (True, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice(mode="required")),
        ({"type": "tool", "name": "weather"}, ToolChoice(mode="required", names=("weather",))),
        ({"type": "none"}, ToolChoice(mode="none")),
    ],
)
def test_tool_choice(client, service, given, expected):
    client.messages.create(**CHAT, tools=[WEATHER], tool_choice=given)
    assert (service.requests[0].tool_choice, service.requests[0].parallel_tool_calls) == (expected, True)


@pytest.mark.parametrize(
    ("given", "expected"), [({"type": "adaptive"}, True), ({"type": "disabled"}, False), (None, None)]
)
def test_thinking(client, service, given, expected):
    client.messages.create(**CHAT, **({} if given is None else {"thinking": given}))
    assert (service.requests[0].thinking, service.requests[0].reasoning_budget) == (expected, None)


def test_messages(client, service):
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    client.messages.create(
        model="scripted",
        max_tokens=5,
        system=[text("Be kind."), text("Be brief.")],
        messages=[
            {"role": "user", "content": [text("Look"), document]},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "They ask.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "??"},
                    text("I look."),
                    use("a", city="Oslo"),
                    use("b", city="Rome"),
                ],
            },
            {
                "role": "user",
                "content": [result("a", content="5"), result("b", content=[text("no")], is_error=True), text("So?")],
            },
            {"role": "assistant", "content": [use("c")]},
            {"role": "user", "content": [result("c")]},
        ],
    )
    (request,) = service.requests
    told = [(each.role, each.content, each.tool_call_id) for each in request.messages]
    part = {name: {"type": "text", "text": name} for name in ("Look", "T\nD", "Weather?", "Be kind.", "Be brief.")}
    assert told == [
        ("system", (part["Be kind."], part["Be brief."]), None),
        ("user", (part["Look"], part["T\nD"], part["Weather?"]), None),
        ("assistant", "I look.", None),
        ("tool", "5", "a"),
        ("tool", ({"type": "text", "text": "Error:"}, {"type": "text", "text": "no"}), "b"),
        ("user", "So?", None),
        ("assistant", None, None),
        ("tool", "", "c"),
    ]
    answer = request.messages[2]
    assert answer.reasoning_content == "They ask."
    assert [(call["id"], call["function"]["arguments"]) for call in answer.tool_calls] == [
        ("a", '{"city":"Oslo"}'), ("b", '{"city":"Rome"}'),
    ]  # fmt: skip


def test_a_last_message_of_the_assistant_is_gone_on_with(client, service):
    client.messages.create(**{**CHAT, "messages": [*MESSAGES, {"role": "assistant", "content": "Once upon"}]})
    request = service.requests[0]
    assert (request.add_generation_prompt, request.continue_final_message) == (False, True)


def test_what_changes_nothing_is_listed_or_refused(client, service, url):
    extra = {"colour": 1, "inference_geo": "eu"}
    redacted = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "??"}, text("a", citations=[1])]}
    chat = {**CHAT, "messages": [*MESSAGES, redacted, *MESSAGES]}
    expected = ["colour", "inference_geo", "messages[1].content[0]", "messages[1].content[1].citations"]
    assert client.messages.create(**chat, extra_body=extra).model_extra["ignored_params"] == expected
    with client.messages.stream(**chat, extra_body=extra) as stream:
        assert stream.get_final_message().model_extra["ignored_params"] == expected
    with pytest.raises(anthropic.BadRequestError, match="colour"):
        client.messages.create(**CHAT, extra_body=extra, extra_headers={"x-pelton-strict-params": "true"})
    with pytest.raises(anthropic.BadRequestError, match="colour"):
        client.messages.count_tokens(
            model="scripted", messages=MESSAGES, extra_body=extra, extra_headers={"x-pelton-strict-params": "true"}
        )


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, r"messages\[0\].content\[0\].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": [result("a", content=[{"type": "image", "source": {}}])]}]},
         r"messages\[0\].content\[0\].content\[0\] is an image"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]}, "documents"),
        ({"messages": [{"role": "user", "content": [use("a")]}]}, "tool_use cannot be the user's"),
        ({"messages": [{"role": "assistant", "content": [result("a")]}]}, "tool_result cannot be the assistant's"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": [use("a")]}]}, "must follow"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "",
                                                          "signature": "pelton.??"}]}, *MESSAGES]}, "signature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]}, "mcp_toolset"),
        ({"tools": [{"name": "a"}]}, "input_schema"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "from the start"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"cache_control": {"type": "forever"}}, "cache_control"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_400_that_names_it(url, wrong, match):
    body = {name: value for name, value in {**CHAT, **wrong}.items() if value is not None}
    response = httpx.post(f"{url}/v1/messages", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.search(match, error["message"])


def test_tokens_are_counted_as_the_request_would_use_them(client, service):
    asked = {"system": "Be kind.", "tools": [WEATHER], "messages": [*MESSAGES, {"role": "assistant", "content": "So"}]}
    counted = client.messages.count_tokens(model="scripted", **asked)
    assert counted.input_tokens == len("[weather]<system>Be kind.<user>Hi<assistant>So")
    asked["tool_choice"] = {"type": "none"}
    counted = client.messages.count_tokens(model="scripted", **asked)
    assert counted.input_tokens == len("<system>Be kind.<user>Hi<assistant>So")
    assert service.requests == []


def pinned(service: ScriptedService, count: int) -> list[str]:
    """What is pinned, once it is as many: they come when the answer is out."""
    deadline = time.monotonic() + 5
    while len(service.pins) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    pins = service.pins
    by_id = {request.id: request for request in service.pinned}
    return [bytes(by_id[pin.id].prompt_ids).decode() for pin in pins]


@pytest.mark.parametrize("stream", [False, True])
def test_marked_prefixes_are_pinned_and_counted(client, service, stream):
    chat = {
        "model": "scripted",
        "max_tokens": 5,
        "system": [text("Rules. ", cache_control=HOUR), text("More.")],
        "messages": [
            {"role": "user", "content": [text("First", cache_control=MARK), text("second", cache_control=MARK)]},
            {"role": "assistant", "content": "Yes"},
            {"role": "user", "content": "Go"},
        ],
    }
    message = client.messages.create(**chat, stream=stream)
    usage = next(event.usage for event in message if event.type == "message_delta") if stream else message.usage
    assert pinned(service, 2) == ["<system>Rules. ", "<system>Rules. |More.<user>First|second"]
    assert [round(pin.expires_at - pin.created_at) for pin in service.pins] == [3600, 300]
    # The scripted service counts 5 tokens of the prompt, 2 of them cached.
    told = usage.model_dump()
    assert told["cache_read_input_tokens"] == 2
    assert told["cache_creation"] == {"ephemeral_1h_input_tokens": 13, "ephemeral_5m_input_tokens": 24}
    assert told["cache_creation_input_tokens"] == 37


def test_what_a_chat_is_kept_of_grows_with_it(client, service):
    first = {**CHAT, "cache_control": MARK}
    client.messages.create(**first)
    assert pinned(service, 1) == ["<user>Hi"]
    client.messages.create(**first)
    longer = [*MESSAGES, {"role": "assistant", "content": "Yes"}, *MESSAGES]
    client.messages.create(**{**first, "messages": longer})
    deadline = time.monotonic() + 5
    while len(service.pinned) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert pinned(service, 1) == ["<user>Hi<assistant>Yes<user>Hi"]
    assert len(service.pinned) == 2


def test_marks_on_tools_keep_them_with_the_system(client, service):
    tools = [{**WEATHER, "cache_control": MARK}]
    client.messages.create(**CHAT, tools=tools, system="Be kind.")
    assert pinned(service, 1) == ["[weather]<system>Be kind.<user>"]


def test_no_room_for_a_pin_is_no_failure(client, service):
    service.refuse_pin = Overloaded("no room")
    for stream in (False, True):
        with client.messages.with_streaming_response.create(**CHAT, cache_control=MARK, stream=stream) as response:
            assert response.status_code == 200
            response.read()
    assert service.pins == []


def test_a_key_for_inference_pins_no_more_than_its_share(service, tmp_path):
    store = Store(tmp_path / "s")
    keys = KeyStore(store)
    service.engine.info = msgspec.structs.replace(service.engine.info, kv_tokens=8 * 40)

    def ask(key: str, text: str, count: int) -> list[str]:
        with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
            client.messages.create(**{**CHAT, "messages": [{"role": "user", "content": text}]}, cache_control=HOUR)
        return pinned(service, count)

    with serving(service, store=str(tmp_path / "s")) as url:
        ada, bob, eve = (keys.create(name, scopes=[scope])[1] for name, scope in
                         (("ada", "inference"), ("bob", "inference"), ("eve", "models")))  # fmt: skip
        first, second = "a" * 20, "b" * 20
        assert ask(ada, first, 1) == ["<user>" + first]
        assert ask(ada, second, 1) == ["<user>" + first]  # 26 of 40 tokens are taken
        ask(ada, first + "a" * 14, 1)
        grown = "<user>" + first + "a" * 14
        deadline = time.monotonic() + 5
        while pinned(service, 1) != [grown]:  # in the place of what it goes on from
            assert time.monotonic() < deadline
        assert ask(bob, first, 2) == [grown, "<user>" + first]  # a key's own, whatever others have
        assert len(ask(eve, "c" * 100, 3)) == 3
        service.refuse_pin = Overloaded("no room")
        assert ask(bob, first + "a", 3)[1] == "<user>" + first  # the old one stays where the new one does not fit
    store.close()
