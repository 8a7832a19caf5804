from __future__ import annotations

import json
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.errors import FormatError, InvalidRequest, UnsupportedModel
from pelton.formats import gguf
from pelton.request import Message
from pelton.text.chat import ChatTemplate, with_template
from pelton.text.disguise import Prompt
from pelton.text.messages import probe
from pelton.text.template import Template
from pelton.text.tokenizer import CONTROL, Tokenizer
from tests.unit.chat_templates import ALL, CHATML, THINKING
from tests.unit.vocabularies import byte_level

MORE_CONTROL = [
    "<bos>",
    "<eos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "<|User|>",
    "<|Assistant|>",
]
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather <now> at a place & "time"',
            "parameters": {"type": "object", "properties": {"role": {"type": "string"}, "é": {"type": "number"}}},
        },
    },
)
CALL = {
    "id": "abcd12345",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"role": "a<b", "é": 1.5}'},
}

CHATS: dict[str, tuple[Message, ...]] = {
    "one": (Message(role="user", content="  Why is the sky blue?\n"),),
    "system": (
        Message(role="system", content="Be brief. "),
        Message(role="user", content="if a < b: print('<|im_end|>') # [INST] <eos>"),
        Message(role="assistant", content="\n<think>\nhm\n</think>\n\nYes <b>so</b>"),
        Message(role="user", content="Привет 😀 {{ x }} {% if %}"),
    ),
    "empty": (Message(role="user", content=""),),
}
TOOL_CHAT = (
    Message(role="user", content="Weather?"),
    Message(role="assistant", tool_calls=(CALL,)),
    Message(role="tool", content='{"degrees": 3}', tool_call_id="abcd12345"),
)


@cache
def tokenizer() -> Tokenizer:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] = metadata["tokenizer.ggml.tokens"] + MORE_CONTROL
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"] + [CONTROL] * len(MORE_CONTROL)
    return Tokenizer(metadata)


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(ALL[name], tokenizer(), special=SPECIAL)


def oracle(name: str, messages: tuple[Message, ...], tools: Any = None, **kwargs: Any) -> str | Exception:
    """What transformers renders, given messages in the form that this template expects."""
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = []
    for message in messages:
        item: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if name == "parts_only":
            item["content"] = [{"type": "text", "text": message.content}] if message.content else []
        if message.tool_calls:
            item["content"] = None if name == "deepseek" else ""
            item["tool_calls"] = json.loads(json.dumps(message.tool_calls))
            if name != "deepseek":
                for call in item["tool_calls"]:
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if message.tool_call_id:
            item["tool_call_id"] = message.tool_call_id
        plain.append(item)
    try:
        rendered, _ = render_jinja_template(
            [plain], tools=list(tools) if tools else None, chat_template=ALL[name], **SPECIAL, **kwargs
        )
    except Exception as error:
        return error
    return rendered[0]


def check(name: str, messages: tuple[Message, ...], tools: Any = None, **kwargs: Any) -> Prompt | None:
    kwargs.setdefault("add_generation_prompt", False)
    expected = oracle(name, messages, tools, **kwargs)
    generation = {key: kwargs.pop(key) for key in ("add_generation_prompt", "continue_final_message") if key in kwargs}
    if isinstance(expected, Exception):
        with pytest.raises(InvalidRequest):
            template(name).render(messages, tools=tools, template_kwargs=kwargs, **generation)
        return None
    prompt = template(name).render(messages, tools=tools, template_kwargs=kwargs, **generation)
    assert prompt.text == expected
    assert tokenizer().decode(tokenizer().encode_segments(prompt.segments), skip_special=False) == prompt.text
    return prompt


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("with_tools", [True, False])
def test_renders_what_transformers_renders(name: str, chat: str, add_generation_prompt: bool, with_tools: bool) -> None:
    tools = TOOLS if with_tools else None
    assert check(name, CHATS[chat], tools, add_generation_prompt=add_generation_prompt) is not None


@pytest.mark.parametrize("name", ["llama3", "mistral", "thinking", "deepseek"])
def test_tool_calls(name: str) -> None:
    prompt = check(name, TOOL_CHAT, TOOLS, add_generation_prompt=True)
    assert prompt is not None
    assert "None" not in prompt.text
    for same in (None, "", ()):
        call = Message(role="assistant", content=same, tool_calls=(CALL,))
        again = template(name).render((TOOL_CHAT[0], call, TOOL_CHAT[2]), tools=TOOLS, add_generation_prompt=True)
        assert again == prompt


def test_template_arguments_and_continued_messages() -> None:
    for thinking in (True, False):
        check("thinking", CHATS["one"], add_generation_prompt=True, enable_thinking=thinking)
    check("llama3", CHATS["one"], add_generation_prompt=True, date_string="1 Jan 2031")
    for name in ("chatml", "llama3", "gemma", "mistral"):
        for end in ("I think", "I think  \n", "<|im_end|> so"):
            chat = (*CHATS["one"], Message(role="assistant", content=end))
            check(name, chat, continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(InvalidRequest, match="only one"):
        template("chatml").render(CHATS["one"], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="'messages' is already taken"):
        template("chatml").render(CHATS["one"], template_kwargs={"messages": []})
    with pytest.raises(InvalidRequest, match=r"U\+D800 stands alone"):
        template("chatml").render((Message(role="user", content="a\ud800"),))
    render = template("chatml").render
    for name in ("self", "template", "name", "inputs", ""):  # a template may read any name
        assert render(CHATS["one"], template_kwargs={name: 1}) == render(CHATS["one"])
    with pytest.raises(InvalidRequest, match="no content"):
        template("chatml").render(CHATS["empty"], continue_final_message=True, add_generation_prompt=False)


def test_refusals_of_a_template() -> None:
    two_users = (Message(role="user", content="a"), Message(role="user", content="b"))
    check("mistral", two_users)
    with pytest.raises(InvalidRequest, match="must alternate"):
        template("gemma").render(two_users)


def control(prompt: Prompt) -> list[str]:
    return [tokenizer().token_text(part) for part in prompt.segments if isinstance(part, int)]


FORGERIES = [
    *MORE_CONTROL,
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<",
    "<|im_",
    "start|>",
    "|im_end|>",
    "</think>",
]


@pytest.mark.parametrize("name", [name for name in ALL if name != "helpers"])
@given(st.lists(st.sampled_from([*FORGERIES, " ", "\n", "x", "<think>"]), max_size=8).map("".join))
@settings(max_examples=40, deadline=None)
def test_a_users_text_never_becomes_a_control_token(name: str, content: str) -> None:
    def chat(text: str) -> tuple[Message, ...]:
        return (
            Message(role="system", content=text),
            Message(role="user", content=text),
            Message(role="assistant", content=text),
            Message(role="user", content="|im_end|>" + text),
        )

    prompt = check(name, chat(content), add_generation_prompt=True)
    assert prompt is not None
    assert control(prompt) == control(template(name).render(chat("harmless")))


def test_forgery_in_tools_names_and_arguments() -> None:
    for forged in ("<|im_end|>", "<eos>", "[INST]"):
        tool = {
            "type": "function",
            "function": {"name": "f", "parameters": {forged: {"role": forged}, "role": [forged]}},
        }
        for name in ("llama3", "mistral", "thinking"):
            prompt = check(name, CHATS["one"], (tool,))
            assert prompt is not None
            assert forged in prompt.text
            assert control(prompt) == control(
                template(name).render(CHATS["one"], tools=TOOLS, add_generation_prompt=False)
            )
        given = template("llama3").render(CHATS["one"], template_kwargs={"date_string": forged})
        assert control(given) == control(template("llama3").render(CHATS["one"]))
    with pytest.raises(InvalidRequest, match=r"messages\[0\].role"):
        template("chatml").render((Message(role="user<|im_end|>", content="x"),))


def test_two_messages_cannot_join_to_a_control_token() -> None:
    bare = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>", tokenizer())
    halves = (Message(role="user", content="<|im_"), Message(role="user", content="start|>"))
    assert control(bare.render(halves)) == ["<|im_end|>"]
    deleting = ChatTemplate("{% for m in messages %}{{ m.content | replace('<x>', '') }}{% endfor %}", tokenizer())
    assert control(deleting.render((Message(role="user", content="<|im_<x>start|>"),))) == []


def test_a_template_that_looks_at_control_text_is_refused_or_safe() -> None:
    source = "{{ messages[0].content.split('<|im_end|>')[-1] }}<|im_end|>"
    prompt = ChatTemplate(source, tokenizer()).render((Message(role="user", content="a<|im_end|>b"),))
    assert (prompt.text, control(prompt)) == ("b<|im_end|>", ["<|im_end|>"])
    source = "{{ messages[0].content.replace('<|im_end|>', '<|im_start|>') }}"
    with pytest.raises(InvalidRequest, match="control tokens"):
        ChatTemplate(source, tokenizer()).render((Message(role="user", content="a<|im_end|>b"),))


def test_private_characters_in_a_message_survive() -> None:
    content = "\U000f0000<|im_end|>\U000f0001 \U000f0002"
    prompt = template("chatml").render((Message(role="user", content=content),), add_generation_prompt=False)
    assert prompt.text == f"<|im_start|>user\n{content}<|im_end|>\n"
    chat = (Message(role="user", content="q"), Message(role="assistant", content=content))
    assert (
        template("chatml").render(chat, continue_final_message=True, add_generation_prompt=False).text.endswith(content)
    )


def test_content_in_parts() -> None:
    parts = ({"type": "text", "text": "a"}, {"type": "text", "text": "b"})
    for name in ("chatml", "gemma", "parts_only"):
        joined = template(name).render((Message(role="user", content="a\nb"),))
        assert template(name).render((Message(role="user", content=parts),)) == joined
        assert "'type'" not in joined.text
        assert template(name).render((Message(role="user", content=()),)) == template(name).render(CHATS["empty"])
    image = ({"type": "image_url", "image_url": {"url": "data:"}},)
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[0\] is of type 'image_url'"):
        template("chatml").render((Message(role="user", content=image),))
    with pytest.raises(InvalidRequest, match="text is not a string"):
        template("chatml").render((Message(role="user", content=({"type": "text"},)),))


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ((), "empty"),
        ((Message(role="user", content="a"), Message(role="assistant")), r"messages\[1\] has neither"),
        ((Message(role="assistant", tool_calls=({"id": "x"},)),), r"messages\[0\]\.tool_calls"),
        (
            (Message(role="assistant", tool_calls=({"function": {"name": "f", "arguments": "{"}},)),),
            "arguments of 'f' are not JSON",
        ),
    ],
)
def test_messages_that_make_no_sense(messages: tuple[Message, ...], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as caught:
        template("thinking").render(messages)
    assert caught.value.param == "messages"


def test_what_templates_expect_is_found_out() -> None:
    shapes = {name: probe(Template(ALL[name])) for name in ("thinking", "deepseek", "parts_only")}
    assert shapes["thinking"] == (False, {"content": ""}, True)
    assert shapes["deepseek"] == (False, {"content": None}, False)
    assert shapes["parts_only"].as_parts


def test_what_a_template_expects_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[object] = []
    run_all = Template.run_all
    monkeypatch.setattr(Template, "run_all", lambda self, inputs: rendered.append(inputs) or run_all(self, inputs))

    def num_renderings(each: ChatTemplate) -> int:
        rendered.clear()
        each.render(CHATS["one"])
        return len(rendered)

    source = "{{ messages[0].content }}, which no other test has"
    first = ChatTemplate(source, tokenizer())
    assert num_renderings(first) > 10
    assert num_renderings(ChatTemplate(source, tokenizer())) == num_renderings(first)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10000000000 }}",
        "{{ [1] | tojson(indent=100000000) }}",
        "{{ none + 'x' }}",
        "{{ messages.nothing.there }}",
        "{{ 1 | tojson(colour=1) }}",
        "{{ 'x' | indent('a', 'b', 'c', 'd') }}",
        "{{ 1 // 0 }}",
        "{{ strftime_now(5) }}",
    ],
)
def test_hostile_or_broken_templates_end_in_an_error(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, tokenizer()).render(CHATS["one"])


def nested(depth: int) -> Any:
    value: Any = "<"
    for _ in range(depth):
        value = [value]
    return value


def test_deep_nesting() -> None:
    def ask(depth: int) -> str:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"x": nested(depth)}}}
        return template("thinking").render(CHATS["one"], tools=(tool,)).text

    assert "[" * 90 + '"<"' in ask(90)
    for depth in (200, 5_000):
        with pytest.raises(InvalidRequest, match="deep"):
            ask(depth)


def test_templates_see_no_python() -> None:
    for source in ("{{ messages.__class__ }}", "{{ raise_exception.__globals__ }}", "{{ ''.__class__.__mro__ }}"):
        with pytest.raises(InvalidRequest):
            ChatTemplate(source + "{{ 1 + none }}", tokenizer()).render(CHATS["one"])


def test_a_template_that_cannot_be_read() -> None:
    with pytest.raises(UnsupportedModel, match="chat template"):
        ChatTemplate("{% if %}", tokenizer()).render(CHATS["one"])


def test_templates_of_a_file() -> None:
    metadata = byte_level() | {"tokenizer.chat_template": "{{ eos_token }}{{ messages[0].content }}"}
    assert ChatTemplate.from_metadata(metadata, tokenizer()).render(CHATS["one"]).segments[0] == 2
    metadata["tokenizer.chat_template.tool_use"] = "with tools"
    assert ChatTemplate.from_metadata(metadata, tokenizer()).render(CHATS["one"], tools=TOOLS).text == "with tools"
    default = ChatTemplate.from_metadata(byte_level(), tokenizer()).render(CHATS["system"])
    assert default == ChatTemplate(CHATML, tokenizer()).render(CHATS["system"])
    plain = byte_level()
    plain["tokenizer.ggml.tokens"] = ["<|x|>" if t == "<|im_start|>" else t for t in plain["tokenizer.ggml.tokens"]]
    with pytest.raises(InvalidRequest, match="use completions"):
        ChatTemplate.from_metadata(plain, Tokenizer(plain))


def test_long_chats_have_fuel_enough() -> None:
    chat = tuple(Message(role=role, content="a < b && <x> " * 40) for _ in range(500) for role in ("user", "assistant"))
    for name in ("chatml", "llama3", "thinking", "mistral"):
        assert template(name).render(chat).text.count("a < b") == 40_000
    assert len(template("chatml").render((Message(role="user", content="<x" * 500_000),)).text) > 1_000_000


def test_rendering_in_several_threads() -> None:
    fresh = ChatTemplate(THINKING, tokenizer())
    expected = ChatTemplate(THINKING, tokenizer()).render(CHATS["system"], tools=TOOLS)
    results: list[Prompt] = []
    work = lambda: results.extend(fresh.render(CHATS["system"], tools=TOOLS) for _ in range(20))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 80


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ '%1000000000d'|format(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ('\n' * 1000000)|indent(1000, true, true) }}",
        "{{ strftime_now('%c' * 1000000) }}",
        "{{ messages|tojson(indent=1000000) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_hostile_templates_reach_nothing(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        Template(source).run(messages=[{"role": "user", "content": "hi"}])


def test_another_template_takes_a_files_place_and_its_vocabulary_is_not_decoded_for_that(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "{{ 1 }}", "tokenizer.chat_template.tool_use": "{{ 2 }}"}
    gguf.write(tmp_path / "m.gguf", byte_level() | templates, [])
    (part,) = gguf.read(tmp_path / "m.gguf")
    changed = with_template(part.metadata, "{{ 3 }}")
    assert changed["tokenizer.chat_template"] == "{{ 3 }}"
    assert changed.keys() == part.metadata.keys() - {"tokenizer.chat_template.tool_use"}
    assert isinstance(changed, gguf.Metadata)
    assert changed.encoded("tokenizer.ggml.tokens") is part.metadata.encoded("tokenizer.ggml.tokens")
    assert with_template(templates, "{{ 3 }}") == {"tokenizer.chat_template": "{{ 3 }}"}


@pytest.mark.parametrize("key", ["tokenizer.chat_template", "tokenizer.chat_template.tool_use"])
def test_a_template_that_is_no_text_is_named(key: str) -> None:
    metadata = byte_level() | {"tokenizer.chat_template": "{{ 1 }}", "tokenizer.ggml.padding_token_id": "x"}
    ChatTemplate.from_metadata(metadata, Tokenizer(metadata))
    with pytest.raises(FormatError, match=r"tokenizer\.chat_template is not a string"):
        ChatTemplate.from_metadata(metadata | {key: ["{{ 1 }}"]}, Tokenizer(metadata))


def test_errors_call_a_template_by_its_name() -> None:
    metadata = byte_level() | {"tokenizer.chat_template": "{% if %}"}
    for name in ("the model's chat template", "the request's chat template"):
        with pytest.raises(UnsupportedModel, match=f"^{name} cannot be read"):
            ChatTemplate.from_metadata(metadata, Tokenizer(metadata), name=name).render(
                [Message(role="user", content="x")]
            )
