"""What a request of /v1/responses shows the model: items, as they are stored, and as the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pelton import structured
from pelton.errors import InvalidRequest
from pelton.request import Grammar, Message, Request, Tool, ToolChoice
from pelton.server import responses_types as wire
from pelton.server.answer import arguments_object
from pelton.server.openai_structured import grammar_of

MAX_ID = 128
"""Characters of an item's id."""
Find = Callable[[str], wire.Item]
"""The item of an id, which is stored."""


def prompt(body: wire.CountRequest, items: Sequence[wire.Item]) -> Request:
    """All that shapes the prompt. `items`: of the whole thread."""
    return Request(
        id="",
        model=body.model,
        messages=messages(body.instructions, items),
        tools=tuple(_tool(i, each) for i, each in enumerate(body.tools or ())),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        template_kwargs=body.chat_template_kwargs or {},
        grammar=structured.one_of([_format(body.text), grammar_of(body)]),
    )


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of a response's item: it says which response's."""
    return f"{prefix}_{response_id.removeprefix('resp_')}{index:05x}"


def response_id(item_id: str) -> str:
    """Of the response that an item of ours belongs to."""
    return f"resp_{item_id.partition('_')[2][:-5]}"


def items(given: str | Sequence[wire.InputItem] | None, response_id: str, find: Find) -> list[wire.Item]:
    """A request's own input, as it is stored."""
    if isinstance(given, str):
        given = [wire.InputItem(role="user", content=given)]
    return [_item(each, i, response_id, find) for i, each in enumerate(given or ())]


def _item(given: wire.InputItem, index: int, response_id: str, find: Find) -> wire.Item:
    where = f"input[{index}]"
    if given.id is not None and not 1 <= len(given.id) <= MAX_ID:
        raise InvalidRequest(f"{where}.id has {len(given.id)} characters, must have 1 to {MAX_ID}", param="input")
    kind = given.type or ("message" if given.role is not None or given.id is None else "item_reference")
    if kind == "item_reference":
        return find(_needed(given.id, f"{where}.id"))
    id = given.id or item_id(_PREFIXES.get(kind, "item"), response_id, index)
    status = _STATUS.get(given.status or "completed", "completed")
    match kind:
        case "message":
            role = given.role
            if role is None:
                raise InvalidRequest(f"{where}.role is missing", param="input")
            if given.content is None:
                raise InvalidRequest(f"{where}.content is missing", param="input")
            return wire.Message(id=id, status=status, role=role, content=_content(given.content, role, where))
        case "reasoning":
            return wire.ReasoningItem(
                id=id,
                status=status,
                summary=[wire.SummaryText(text=each.text or "") for each in given.summary or ()],
                content=[wire.ReasoningText(text=each) for each in _texts(given.content or (), f"{where}.content")],
            )
        case "function_call":
            return wire.FunctionCall(
                id=id,
                status=status,
                call_id=_needed(given.call_id, f"{where}.call_id"),
                name=_needed(given.name, f"{where}.name"),
                arguments=_needed(given.arguments, f"{where}.arguments"),
            )
        case "function_call_output":
            output = _needed(given.output, f"{where}.output")
            if not isinstance(output, str):
                output = [wire.InputText(text=each) for each in _texts(output, f"{where}.output")]
            call_id = _needed(given.call_id, f"{where}.call_id")
            return wire.FunctionCallOutput(id=id, status=status, call_id=call_id, output=output)
    raise InvalidRequest(f"{where}: items of type {kind[:60]!r} are not offered here", param="input")


def check_calls(before: Sequence[wire.Item], own: Sequence[wire.Item]) -> None:
    """Raise `InvalidRequest` for an output among a request's own items whose call does not stand before it."""
    calls = {each.call_id for each in before if isinstance(each, wire.FunctionCall)}
    for item in own:
        if isinstance(item, wire.FunctionCall):
            calls.add(item.call_id)
        elif isinstance(item, wire.FunctionCallOutput) and item.call_id not in calls:
            message = f"input: no tool call found for function call output with call_id {item.call_id[:200]!r}"
            raise InvalidRequest(message, param="input")


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_STATUS: dict[str, wire.ItemStatus] = {"incomplete": "incomplete", "in_progress": "in_progress"}


def _needed(value: Any, name: str) -> Any:
    if value is None:
        raise InvalidRequest(f"{name} is missing", param="input")
    return value


def _content(
    given: str | Sequence[wire.InputPart], role: str, where: str
) -> list[wire.InputText | wire.OutputText | wire.Refusal]:
    """What the assistant says is output, and what all others say is input, whatever a part is called."""
    made = wire.OutputText if role == "assistant" else wire.InputText
    if isinstance(given, str):
        return [made(text=given)]
    parts: list[wire.InputText | wire.OutputText | wire.Refusal] = []
    for i, part in enumerate(given):
        if part.type == "refusal" and role == "assistant":
            parts.append(wire.Refusal(refusal=part.refusal or ""))
        else:
            parts.append(made(text=_text(part, f"{where}.content[{i}]")))
    return parts


_TEXTS = frozenset({"input_text", "output_text", "text", "reasoning_text"})
_OTHERS = {"input_image": "an image", "input_file": "a file", "input_audio": "audio"}


def _text(part: wire.InputPart, where: str) -> str:
    if part.type not in _TEXTS:
        what = _OTHERS.get(part.type, f"of type {part.type[:40]!r}")
        raise InvalidRequest(f"{where} is {what}: this model reads text only", param="input")
    if part.text is None:
        raise InvalidRequest(f"{where}.text is missing", param="input")
    return part.text


def _texts(parts: str | Sequence[wire.InputPart], where: str) -> list[str]:
    if isinstance(parts, str):
        return [parts]
    return [_text(each, f"{where}[{i}]") for i, each in enumerate(parts)]


def messages(instructions: str | None, items: Sequence[wire.Item]) -> tuple[Message, ...]:
    """The whole chat. What follows each other of the assistant is one turn, as it was when the model wrote it: so the
    prompt of a thread begins with what is cached of its earlier turns."""
    found = [Message(role="system", content=instructions)] if instructions else []
    turn: list[wire.Message | wire.ReasoningItem | wire.FunctionCall] = []
    for item in items:
        match item:
            case wire.FunctionCallOutput(call_id=call_id, output=output):
                found += _turn(turn)
                turn = []
                texts = [output] if isinstance(output, str) else [each.text for each in output]
                found.append(Message(role="tool", tool_call_id=call_id, content=_joined(texts)))
            case wire.Message(role="user" | "system" | "developer" as role):
                found += _turn(turn)
                turn = []
                found.append(Message(role=role, content=_joined(_said(item))))
            case _:
                turn.append(item)
    return (*found, *_turn(turn))


def _turn(items: Sequence[wire.Message | wire.ReasoningItem | wire.FunctionCall]) -> list[Message]:
    if not items:
        return []
    said = [text for each in items if isinstance(each, wire.Message) for text in _said(each)]
    thoughts = [_thoughts(each) for each in items if isinstance(each, wire.ReasoningItem)]
    calls = tuple(_call(each) for each in items if isinstance(each, wire.FunctionCall))
    return [
        Message(
            role="assistant",
            content=_joined(said) if said or not calls else None,
            reasoning_content="\n".join(thoughts) or None,
            tool_calls=calls or None,
        )
    ]


def _said(message: wire.Message) -> list[str]:
    return [each.refusal if isinstance(each, wire.Refusal) else each.text for each in message.content]


def _thoughts(item: wire.ReasoningItem) -> str:
    """Where only a summary is known, that."""
    return "\n".join(each.text for each in (item.content or item.summary))


def _joined(texts: Sequence[str]) -> str | tuple[dict[str, Any], ...]:
    if len(texts) <= 1:
        return "".join(texts)
    return tuple({"type": "text", "text": each} for each in texts)


def _call(item: wire.FunctionCall) -> dict[str, Any]:
    """Templates read whole arguments alone."""
    arguments = item.arguments
    if item.status == "incomplete":
        arguments = msgspec.json.encode(arguments_object(arguments)).decode()
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": arguments}}


def _tool(index: int, given: wire.FunctionTool) -> Tool:
    if given.type != "function":
        message = f"tools[{index}]: {given.type[:60]!r} is a tool of OpenAI's own: this server offers functions alone"
        raise InvalidRequest(message, param="tools")
    if given.name is None:
        raise InvalidRequest(f"tools[{index}].name is missing", param="tools")
    return Tool(name=given.name, description=given.description, parameters=given.parameters, strict=bool(given.strict))


def _tool_choice(given: wire.ToolChoice | None) -> ToolChoice:
    match given:
        case None:
            return ToolChoice()
        case "none" | "auto" | "required":
            return ToolChoice(mode=given)
        case wire.NamedChoice(type="function", name=str(name)):
            return ToolChoice(mode="required", names=(name,))
        case wire.NamedChoice(type="allowed_tools", mode=mode, tools=list(tools)) if tools:
            names = tuple(each.name for each in tools if each.type == "function" and each.name is not None)
            if len(names) == len(tools):
                return ToolChoice(mode=mode or "auto", names=names)
    raise InvalidRequest("tool_choice names no function, or tools that are none", param="tool_choice")


def _format(given: wire.TextConfig | None) -> Grammar | None:
    asked = None if given is None else given.format
    match asked:
        case None | wire.TextFormat(type="text"):
            return None
        case wire.TextFormat(type="json_object"):
            return structured.json_object("text.format")
        case wire.TextFormat(schema=None):
            raise InvalidRequest("text.format.schema is missing", param="text")
        case wire.TextFormat(schema=schema, strict=strict):
            assert schema is not None
            return structured.json_schema(schema, "text.format.schema", is_strict=strict is not False)
