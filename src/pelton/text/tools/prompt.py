"""Tools as chat templates read them, and as text for those that know none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pelton.errors import InvalidRequest
from pelton.request import Message, Tool

INSTRUCTIONS = """You can call functions. To call some, answer with nothing but JSON, one object for each call:
{"name": <the function's name>, "arguments": {<argument's name>: <value>}}
If you need no function, answer as usual. The functions, with JSON schemas of their arguments:"""


def template_form(tool: Tool) -> dict[str, Any]:
    """A tool in OpenAI's form, which templates expect."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def told_in_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The same chat without tools: the system's message tells what there is, calls are the assistant's text, and their
    results are the user's."""
    functions = (json.dumps(template_form(tool)["function"], ensure_ascii=False) for tool in tools)
    told = "\n".join([INSTRUCTIONS, *functions]) if tools else ""
    plain = list(_plain(messages))
    if not told:
        return plain
    if plain and plain[0].role in ("system", "developer"):
        before = plain[0].content
        parts = [{"type": "text", "text": before}] if isinstance(before, str) else list(before or ())
        content = (*parts, {"type": "text", "text": "\n" + told})
        return [msgspec.structs.replace(plain[0], content=content), *plain[1:]]
    return [Message(role="system", content=told), *plain]


def _plain(messages: Sequence[Message]) -> Iterator[Message]:
    results: list[str] = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        if message.role == "tool":
            name = message.name or names.get(message.tool_call_id or "", "the function")
            results.append(f"{name} gave: {_text(message, index)}")
            continue
        if results:
            yield Message(role="user", content="\n".join(results))
            results = []
        if not message.tool_calls:
            yield message
            continue
        lines = [_text(message, index)] if message.content else []
        for call in message.tool_calls:
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise InvalidRequest(f"messages[{index}].tool_calls: each needs function.name", param="messages")
            names[str(call.get("id"))] = function["name"]
            arguments = function.get("arguments") or "{}"
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            lines.append(f'{{"name": {json.dumps(function["name"])}, "arguments": {text}}}')
        yield msgspec.structs.replace(message, content="\n".join(lines), tool_calls=None)
    if results:
        yield Message(role="user", content="\n".join(results))


def _text(message: Message, index: int) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    texts = [part.get("text") for part in message.content]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"messages[{index}].content has parts that are no text", param="messages")
    return "\n".join(map(str, texts))
