"""A request of Ollama's dialect -> `Request`: messages, tools, options, format, thinking."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pelton import options, structured
from pelton.config import Seconds
from pelton.errors import InvalidRequest
from pelton.pool import jinja
from pelton.request import Grammar, Message, Request, SamplingParams, Tool
from pelton.server import ollama_types as wire
from pelton.server.answer import left_open
from pelton.server.context import current

DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's own, where neither the request nor the model says otherwise."""


class Asked(NamedTuple):
    """A request without its prompt, and what of it needs more than `Request` says."""

    request: Request
    ignored: dict[str, Any]
    """Options that change nothing, by their paths."""
    context: int | None
    """`num_ctx`."""


def asked(body: wire.Common) -> Asked:
    """All but the prompt. Raises `InvalidRequest`."""
    meant = options.meaning(body.options or {})
    sampling = {**DEFAULTS, **meant.sampling}
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    ignored = {f"options.{name}": True for name in meant.ignored}
    for name in ("truncate", "shift"):
        if getattr(body, name):
            ignored[name] = True  # nothing is ever cut: what does not fit is refused, or ends
    ignored |= ignored_keep_alive(body.keep_alive)
    request = Request(
        id=f"ollama-{secrets.token_hex(12)}",
        model=body.model,
        sampling=SamplingParams(**sampling),
        left_open=left_open(meant.sampling),
        thinking=_thinking(body.think),
        reasoning_effort=body.think if isinstance(body.think, str) else None,
        grammar=_grammar(body.format),
        priority=body.priority or 0,
        timeout=body.timeout,
        queue_timeout=body.queue_timeout,
        cache_salt=body.cache_salt or "",
    )
    return Asked(request, ignored, meant.context)


def chat(base: Request, body: wire.OllamaChatRequest) -> Request:
    """With messages and tools. The answer goes on with the assistant's words where they are the last."""
    messages = _messages(body.messages or ())
    last = messages[-1]
    continues = last.role == "assistant" and bool(last.content) and not last.tool_calls
    return msgspec.structs.replace(
        base,
        messages=messages,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        tools=tuple(_tool(i, each) for i, each in enumerate(body.tools or ())),
    )


def single(base: Request, body: wire.OllamaGenerateRequest) -> Request:
    """The prompt as one message of a chat."""
    system = (Message(role="system", content=body.system),) if body.system else ()
    messages = (*system, Message(role="user", content=body.prompt or ""))
    return msgspec.structs.replace(
        base, messages=messages, chat_template=jinja(body.template) if body.template else None
    )


def refuse_images(images: Sequence[Any] | None, where: str) -> None:
    """Raise `InvalidRequest` where there are some."""
    if images:
        raise InvalidRequest(f"{where} are given: this model reads text only", param="images")


def ignored_keep_alive(given: str | float | None) -> dict[str, Any]:
    """The field, where it is given and `Models.use` ignores it."""
    return {} if given is None or current().key.may("models") else {"keep_alive": given}


def keep_alive(given: str | float | None) -> float | None:
    """Seconds that the model stays unused; inf: for ever. None: not given."""
    if given is None or given == "":
        return None
    try:
        return float(Seconds.parse(given))
    except ValueError as error:
        raise InvalidRequest(f"keep_alive: {error}", param="keep_alive") from None


def _thinking(given: bool | str | None) -> bool | None:
    if isinstance(given, str):
        if given not in ("low", "medium", "high"):
            raise InvalidRequest(f"think is {given[:40]!r}, must be true, false, low, medium or high", param="think")
        return True
    return given


def _grammar(given: str | dict[str, Any] | None) -> Grammar | None:
    match given:
        case None | "":
            return None
        case "json":
            return structured.json_object("format")
        case str():
            raise InvalidRequest(f'format is {given[:40]!r}, must be "json" or a JSON schema', param="format")
    return structured.json_schema(given, "format")


def _messages(given: Sequence[wire.OllamaMessage]) -> tuple[Message, ...]:
    """A call has no id of its own in this dialect: a tool's result belongs to the first call of that tool, or of any
    where it does not say, that has none yet."""
    messages = []
    waiting: list[tuple[str, str]] = []
    """(id, tool) of calls without a result."""
    for i, each in enumerate(given):
        refuse_images(each.images, f"messages[{i}].images")
        calls: list[dict[str, Any]] = []
        for call in each.tool_calls or ():
            id = call.id or f"call{i:04d}{len(calls):01d}"
            waiting.append((id, call.function.name))
            arguments = msgspec.json.encode(call.function.arguments).decode()
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": id, "type": "function", "function": function})
        call_id = None
        if each.role == "tool":
            fitting = [pair for pair in waiting if each.tool_name in (None, "", pair[1])]
            call_id = each.tool_call_id or (fitting[0][0] if fitting else None)
            waiting = [pair for pair in waiting if pair[0] != call_id]
        messages.append(
            Message(
                role=each.role,
                content=None if calls and not each.content else each.content or "",
                reasoning_content=each.thinking or None,
                name=each.tool_name or None,
                tool_calls=tuple(calls) or None,
                tool_call_id=call_id,
            )
        )
    return tuple(messages)


def _tool(index: int, given: wire.OllamaTool) -> Tool:
    if given.type != "function":
        raise InvalidRequest(f"tools[{index}] is of type {given.type[:40]!r}, must be function", param="tools")
    function = given.function
    return Tool(name=function.name, description=function.description, parameters=function.parameters)


def check_context(wanted: int | None, context: int) -> tuple[str, ...]:
    """What the client should know where it wants more context than there is."""
    if wanted is None or wanted <= context:
        return ()
    return (f"options.num_ctx is {wanted}, and this model is loaded for {context} tokens; nothing was cut",)
