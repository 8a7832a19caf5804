"""What a request of Anthropic's dialect shows the model: system, messages and tools, as chat templates know them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pelton.errors import InvalidRequest
from pelton.request import Message, Request, Tool, ToolChoice
from pelton.server import anthropic_types as wire

Part = dict[str, Any]
FAILED = "Error: "
"""What stands before the result of a tool that failed: templates have no other place for that."""


def prompt(body: wire.CountRequest, *, is_whole: bool = True) -> Request:
    """All that shapes the prompt. Not `is_whole`: a beginning of a chat, which nothing is to follow yet."""
    goes_on = is_whole and continues(body)
    thinking, choice = body.thinking, body.tool_choice
    return Request(
        id="",
        model=body.model,
        messages=messages(body),
        add_generation_prompt=is_whole and not goes_on,
        continue_final_message=goes_on,
        tools=tools(body.tools or ()),
        tool_choice=tool_choice(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        thinking=None if thinking is None else thinking.type != "disabled",
        reasoning_effort=None if body.output_config is None else body.output_config.effort,
        reasoning_budget=None if thinking is None else _budget(thinking),
    )


def messages(body: wire.CountRequest) -> tuple[Message, ...]:
    """The whole chat. Neighbours of one role are one message, as templates want them."""
    found: list[Message] = []
    if body.system:
        found.append(Message(role="system", content=_texts(body.system, "system")))
    for i, each in enumerate(body.messages):
        for message in _turn(each, f"messages[{i}]"):
            if found and found[-1].role == message.role and message.role != "tool":
                found[-1] = _joined(found[-1], message)
            else:
                found.append(message)
    return tuple(found)


def continues(body: wire.CountRequest) -> bool:
    """Does the answer go on with the last message, which is the assistant's own?"""
    if not body.messages or body.messages[-1].role != "assistant":
        return False
    content = body.messages[-1].content
    if not isinstance(content, str) and any(isinstance(each, wire.ToolUseBlock) for each in content):
        raise InvalidRequest("the last message calls tools: what they gave must follow it", param="messages")
    return True


def tools(given: Sequence[wire.ToolParam]) -> tuple[Tool, ...]:
    """The tools that the model may call."""
    found = []
    for i, each in enumerate(given):
        if each.type not in (None, "custom"):
            message = f"tools[{i}]: tools of type {each.type[:60]!r} are not offered, only such with an input_schema"
            raise InvalidRequest(message, param="tools")
        if each.input_schema is None:
            raise InvalidRequest(f"tools[{i}].input_schema is missing", param="tools")
        if each.defer_loading or (each.allowed_callers is not None and each.allowed_callers != ["direct"]):
            raise InvalidRequest(f"tools[{i}]: only the model itself can call tools, from the start", param="tools")
        found.append(
            Tool(name=each.name, description=each.description, parameters=each.input_schema, strict=bool(each.strict))
        )
    return tuple(found)


def tool_choice(given: wire.ToolChoice | None) -> ToolChoice:
    """Whether the model calls tools."""
    match given:
        case None:
            return ToolChoice()
        case wire.ToolChoice(type="none" | "auto" as mode):
            return ToolChoice(mode=mode)
        case wire.ToolChoice(type="tool", name=None):
            raise InvalidRequest("tool_choice.name is missing", param="tool_choice")
        case wire.ToolChoice(name=name):
            return ToolChoice(mode="required", names=() if given.type == "any" or name is None else (name,))


def _budget(given: wire.Thinking) -> int | None:
    if given.type == "enabled" and given.budget_tokens is None:
        raise InvalidRequest("thinking.budget_tokens is missing", param="thinking")
    return given.budget_tokens if given.type == "enabled" else None


def signature(thoughts: str, *, is_shown: bool) -> str:
    """Of a block of thoughts. Where it does not show them, the signature is what carries them to the next request."""
    if is_shown:
        return base64.b64encode(hashlib.blake2b(thoughts.encode(), digest_size=24).digest()).decode()
    return _CARRIED + base64.b64encode(thoughts.encode()).decode()


_CARRIED = "pelton."


def _thoughts(block: wire.ThinkingBlock) -> str:
    if block.thinking or not block.signature.startswith(_CARRIED):
        return block.thinking
    try:
        return base64.b64decode(block.signature.removeprefix(_CARRIED), validate=True).decode()
    except ValueError:
        raise InvalidRequest("the signature of a thinking block is not as it was given", param="messages") from None


def _turn(given: wire.MessageParam, where: str) -> Iterator[Message]:
    """The messages that one entry of `messages` stands for: what tools gave are messages of their own."""
    if isinstance(given.content, str):
        yield Message(role=given.role, content=given.content)
        return
    parts: list[Part] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    num_results = 0
    for i, block in enumerate(given.content):
        at = f"{where}.content[{i}]"
        match block:
            case wire.ToolResultBlock() if given.role == "user":
                num_results += 1
                if parts:
                    yield Message(role="user", content=tuple(parts))
                    parts = []
                yield Message(role="tool", tool_call_id=block.tool_use_id, content=_result(block, at))
            case wire.ThinkingBlock() if given.role == "assistant":
                thoughts.append(_thoughts(block))
            case wire.RedactedThinkingBlock() if given.role == "assistant":
                pass  # listed as ignored: what it says is known to another server alone
            case wire.ToolUseBlock() if given.role == "assistant":
                calls.append(_call(block))
            case wire.TextBlock() | wire.ImageBlock() | wire.DocumentBlock():
                parts.append(_part(block, at))
            case _:
                kind = type(block).__struct_config__.tag
                raise InvalidRequest(f"{at}: a block of type {kind} cannot be the {given.role}'s", param="messages")
    if parts or calls or not num_results:
        yield Message(
            role=given.role,
            content=_plain(parts) if parts or not calls else None,
            reasoning_content="".join(thoughts) or None,
            tool_calls=tuple(calls) or None,
        )


def _joined(first: Message, second: Message) -> Message:
    """Two neighbours as one."""
    thoughts = [each for each in (first.reasoning_content, second.reasoning_content) if each]
    parts = [*_parts(first.content), *_parts(second.content)]
    return Message(
        role=first.role,
        content=tuple(parts) or None,
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=(*(first.tool_calls or ()), *(second.tool_calls or ())) or None,
    )


def _parts(content: str | tuple[Part, ...] | None) -> Sequence[Part]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content or ()


def _plain(parts: Sequence[Part]) -> str | tuple[Part, ...]:
    return parts[0]["text"] if len(parts) == 1 else tuple(parts)


def _call(block: wire.ToolUseBlock) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _result(block: wire.ToolResultBlock, where: str) -> str | tuple[Part, ...]:
    content = block.content or ""
    if not block.is_error:
        return _texts(content, f"{where}.content")
    if isinstance(content, str):
        return FAILED + content
    return ({"type": "text", "text": FAILED.strip()}, *_parts(_texts(content, f"{where}.content")))


def _texts(
    content: str | Sequence[wire.TextBlock | wire.ImageBlock | wire.DocumentBlock], where: str
) -> str | tuple[Part, ...]:
    if isinstance(content, str):
        return content
    return _plain([_part(block, f"{where}[{i}]") for i, block in enumerate(content)])


def _part(block: wire.TextBlock | wire.ImageBlock | wire.DocumentBlock, where: str) -> Part:
    param = where.split("[")[0].split(".")[0]
    match block:
        case wire.TextBlock():
            return {"type": "text", "text": block.text}
        case wire.DocumentBlock(source={"type": "text", "data": str(data)}):
            return {"type": "text", "text": "\n".join(each for each in (block.title, block.context, data) if each)}
        case wire.DocumentBlock():
            raise InvalidRequest(f"{where}: documents other than plain text cannot be read here", param=param)
    raise InvalidRequest(f"{where} is an image: this model reads text only", param=param)
