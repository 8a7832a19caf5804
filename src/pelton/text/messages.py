"""Messages -> the plain data that a template reads, in the form which this template wants."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pelton.errors import InvalidRequest
from pelton.request import Message
from pelton.text.template import Template, TooCostly

_ROLE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_PROBE = "probe4711"


class Shape(NamedTuple):
    """What a template wants of a message, found out by rendering a small chat."""

    as_parts: bool
    """Content must be a list of parts."""
    without_content: Mapping[str, Any]
    """What stands for the content of an assistant's turn that only calls tools."""
    parsed_arguments: bool
    """A tool call's arguments are an object (not its JSON text)."""


@lru_cache(64)
def probe(template: Template) -> Shape:
    """Render small chats, up to 14, to find out what `template` wants: once, also where each request brings it anew."""

    def sees(*messages: dict[str, Any], words: Sequence[str]) -> bool:
        inputs: dict[str, Any] = {"tools": None, "documents": None, "bos_token": "", "eos_token": ""}
        try:
            text = template.run(messages=list(messages), add_generation_prompt=False, **inputs)
        except TooCostly:
            raise
        except InvalidRequest:
            return False
        return all(word in text for word in words)

    def user(content: Any) -> dict[str, Any]:
        return {"role": "user", "content": content}

    parts = [{"type": "text", "text": _PROBE}]
    as_parts = not sees(user(_PROBE), words=[_PROBE]) and sees(user(parts), words=[_PROBE])
    question = user(parts if as_parts else _PROBE)
    arguments = {"city": "Oslo4711"}
    contents: list[dict[str, Any]] = [{"content": ""}, {}, {"content": None}]
    # Arguments in JSON are looked for first: a template that wants text would print an object as Python does.
    for value, parsed, content in itertools.product(('"Oslo4711"', "Oslo4711"), (True, False), contents):
        call = {"name": "weather4711", "arguments": arguments if parsed else json.dumps(arguments)}
        calls = [{"id": "call12345", "type": "function", "function": call}]
        turn = {"role": "assistant", **content, "tool_calls": calls}
        if sees(question, turn, words=["weather4711", value]):
            return Shape(as_parts, content, parsed)
    return Shape(as_parts, {"content": ""}, True)


def plain_message(message: Message, shape: Shape, index: int) -> dict[str, Any]:
    """A message as templates read it: plain data, absent fields left out."""
    if not _ROLE.fullmatch(message.role):
        raise InvalidRequest(f"messages[{index}].role is not a word of letters, digits, _ . -", param="messages")
    plain: dict[str, Any] = {"role": message.role}
    content = _joined(message.content, index)
    if content:
        plain["content"] = [{"type": "text", "text": content}] if shape.as_parts else content
    elif message.tool_calls:
        plain |= shape.without_content
    elif content is None:
        raise InvalidRequest(f"messages[{index}] has neither content nor tool_calls", param="messages")
    else:
        plain["content"] = [] if shape.as_parts else ""
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call, shape, index) for call in message.tool_calls]
    for field in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, field)) is not None:
            plain[field] = value
    if message.reasoning_content is not None:
        plain["thinking"] = message.reasoning_content
    return plain


def _joined(content: str | tuple[dict[str, Any], ...] | None, index: int) -> str | None:
    """Content as one string: text parts are joined with a line feed. No parts are an empty string."""
    if content is None or isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        kind, text = part.get("type", "text"), part.get("text")
        if kind not in ("text", "input_text", "output_text"):
            raise InvalidRequest(
                f"messages[{index}].content[{number}] is of type {str(kind)[:40]!r}: this model reads text only",
                param="messages",
            )
        if not isinstance(text, str):
            raise InvalidRequest(f"messages[{index}].content[{number}].text is not a string", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _plain_call(call: dict[str, Any], shape: Shape, index: int) -> dict[str, Any]:
    """A tool call whose arguments are what the template expects: an object or its JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"messages[{index}].tool_calls: each needs function.name", param="messages")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and shape.parsed_arguments:
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise InvalidRequest(
                f"messages[{index}].tool_calls: the arguments of {function['name'][:64]!r} are not JSON",
                param="messages",
            ) from None
    elif not isinstance(arguments, str) and not shape.parsed_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
