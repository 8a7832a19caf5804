"""The body of POST /v1/responses -> what the engine is asked, and the response before it has any output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pelton.errors import InvalidRequest
from pelton.request import Request
from pelton.server import responses_types as wire
from pelton.server.answer import ignored_params
from pelton.server.openai import open_fields, sampling
from pelton.server.openai_account import check_metadata, is_other_tier, tier_of, user_of
from pelton.server.responses_prompt import prompt


def request_of(id: str, body: wire.ResponsesRequest, items: Sequence[wire.Item]) -> Request:
    """What is asked. `items`: of the whole thread."""
    wants_logprobs = wire.LOGPROBS in (body.include or ())
    if body.top_logprobs and not wants_logprobs:
        raise InvalidRequest(f"top_logprobs needs include: [{wire.LOGPROBS!r}]", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if not items and not body.instructions:
        raise InvalidRequest("input is missing", param="input")
    check_metadata(body.metadata)
    return msgspec.structs.replace(
        prompt(body, items),
        id=id,
        sampling=sampling(body, body.max_output_tokens, (body.top_logprobs or 0) if wants_logprobs else None),
        left_open=open_fields(body),
        reasoning_budget=body.reasoning_budget,
        priority=tier_of(body).priority,
        timeout=body.timeout,
        queue_timeout=body.queue_timeout,
        cache_salt=body.cache_salt or "",
        user=user_of(body),
    )


def response_of(id: str, body: wire.ResponsesRequest, ignored: list[str], *, keeps: bool) -> wire.Response:
    """The response without output. `keeps`: can it be stored?"""
    wants_store = body.store is not False
    warnings = ["this server stores no responses: this one cannot be read again or gone on with"]
    return wire.Response(
        id=id,
        created_at=int(time.time()),
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning or wire.Reasoning(),
        safety_identifier=body.safety_identifier,
        service_tier=tier_of(body).name,
        store=wants_store and keeps,
        temperature=body.temperature,
        text=_text(body.text),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        user=body.user,
        metadata=body.metadata or {},
        ignored_params=ignored or msgspec.UNSET,
        warnings=warnings if wants_store and not keeps else msgspec.UNSET,
    )


def _text(given: wire.TextConfig | None) -> wire.TextConfig:
    """With what holds where nothing was said."""
    asked = None if given is None else given.format
    return wire.TextConfig(format=asked or wire.TextFormat(type="text"), verbosity="medium")


def ignored(body: wire.CountRequest, extras: dict[str, Any]) -> list[str]:
    """Names of what changes nothing here. Raises `InvalidRequest` for what would, and for all where parameters are
    strict."""
    told: dict[str, Any] = {
        "text.verbosity": body.text is not None and body.text.verbosity in ("low", "high"),
        "reasoning.summary": body.reasoning is not None and body.reasoning.summary,
        "reasoning.generate_summary": body.reasoning is not None and body.reasoning.generate_summary,
        "truncation": body.truncation == "auto",
    }
    for i, item in enumerate(body.input if isinstance(body.input, list) else ()):
        told[f"input[{i}].encrypted_content"] = item.encrypted_content
    if isinstance(body, wire.ResponsesRequest):
        told |= {f"include.{each}": each != wire.LOGPROBS for each in body.include or ()}
        told["service_tier"] = is_other_tier(body)
        told["stream_options.include_obfuscation"] = (
            body.stream_options is not None and body.stream_options.include_obfuscation
        )
    return ignored_params(extras | {name: value for name, value in told.items() if value}, wire.NOT_OFFERED)
