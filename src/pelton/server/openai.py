"""OpenAI's dialect: /v1/models, /v1/chat/completions and /v1/completions, to `Request`. `openai_reply` writes the
answers; `openai_embeddings` has /v1/embeddings."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from pelton.checks import MAX_LOGIT_BIAS, MAX_PROMPTS, check_count
from pelton.errors import InvalidRequest
from pelton.pool import ModelCard
from pelton.request import Message, Request, SamplingParams, Tool, ToolChoice
from pelton.server import openai_embeddings
from pelton.server import openai_reply_types as replies
from pelton.server import openai_types as wire
from pelton.server.answer import answer, left_open
from pelton.server.models import Models
from pelton.server.openai_account import check_metadata, is_other_tier, tier_of, user_of
from pelton.server.openai_reply import ChatReply, CompletionReply, error_body
from pelton.server.openai_structured import grammar_of
from pelton.server.operation import Dialect, Operation, get, post
from pelton.server.wire import JSON, read


def dialect(models: Models, *more: Operation) -> Dialect:
    """The dialect over these models, with `more` of its operations."""
    here = _Operations(models)
    operations = (
        post(
            "/v1/chat/completions",
            here.chat,
            "Answer a chat",
            wire.ChatRequest,
            replies.Answer[replies.ChatChoice],
            streams=("text/event-stream",),
        ),
        post(
            "/v1/completions",
            here.completions,
            "Go on with a text",
            wire.CompletionRequest,
            replies.Answer[replies.CompletionChoice],
            streams=("text/event-stream",),
        ),
        openai_embeddings.operation(models),
        get("/v1/models", here.listing, "List the models", replies.ModelList),
        get("/v1/models/{name:path}", here.model, "Show one model", replies.ModelCard),
        *more,
    )
    return Dialect(operations=operations, prefixes=("/v1",), error_body=error_body, error=replies.ErrorAnswer)


class _Operations:
    """What each operation does: gets the request, gives the answer."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def chat(self, http: HTTPRequest) -> ASGIApp:
        """Answer a chat."""
        body, extras = await read(http, wire.ChatRequest)
        check_metadata(body.metadata)
        continues, tier = _continues(body), tier_of(body)
        request = Request(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            model=body.model,
            messages=tuple(message(i, each) for i, each in enumerate(body.messages)),
            sampling=_chat_sampling(body),
            left_open=open_fields(body),
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            tools=tuple(tool(each) for each in body.tools or ()),
            tool_choice=_tool_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning_effort=body.reasoning_effort,
            reasoning_budget=body.reasoning_budget,
            template_kwargs=body.chat_template_kwargs or {},
            priority=tier.priority,
            timeout=body.timeout,
            queue_timeout=body.queue_timeout,
            cache_salt=body.cache_salt or "",
            grammar=grammar_of(body),
            user=user_of(body),
        )
        reply = ChatReply(request.id, body, extras | _unkept(body), wants_logprobs=bool(body.logprobs))
        if body.service_tier is not None:
            reply.service_tier = tier.name
        return await answer(self._models, http, reply, [request])

    async def completions(self, http: HTTPRequest) -> ASGIApp:
        """Go on with a text."""
        body, extras = await read(http, wire.CompletionRequest)
        chosen = _sampling(body, body.max_tokens if body.max_tokens is not None else 16, body.logprobs)
        if body.echo and body.logprobs is not None:
            most = max(body.logprobs, body.prompt_logprobs or 0)
            chosen = msgspec.structs.replace(chosen, prompt_logprobs=most)
        if body.suffix:
            _check_suffix(body)
        base = Request(
            id=f"cmpl-{secrets.token_hex(12)}",
            model=body.model,
            sampling=chosen,
            left_open=open_fields(body),
            echo=bool(body.echo),
            suffix=body.suffix or None,
            priority=body.priority or 0,
            timeout=body.timeout,
            queue_timeout=body.queue_timeout,
            cache_salt=body.cache_salt or "",
            grammar=grammar_of(body),
            user=body.user,
        )
        reply = CompletionReply(base.id, body, extras, wants_logprobs=body.logprobs is not None)
        return await answer(self._models, http, reply, _prompts(base, body.prompt))

    async def listing(self, _: HTTPRequest) -> Response:
        """The models there are."""
        cards = [_card(card) for card in await self._models.models()]
        first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
        return JSON(replies.ModelList(data=cards, first_id=first, last_id=last))

    async def model(self, http: HTTPRequest) -> Response:
        """One of them."""
        return JSON(_card(await self._models.model(http.path_params["name"])))


_LIMITS = {"max_completion_tokens", "max_output_tokens"}
"""Other names of `max_tokens`."""
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def message(index: int, given: wire.WireMessage) -> Message:
    """One entry of `messages`."""
    for name in ("function_call", "audio"):
        if getattr(given, name) is not None:
            raise InvalidRequest(f"messages[{index}].{name} is not supported by this server", param="messages")
    content = tuple(given.content) if isinstance(given.content, list) else given.content
    return Message(
        role=given.role,
        content=content,
        name=given.name,
        tool_calls=None if given.tool_calls is None else tuple(given.tool_calls),
        tool_call_id=given.tool_call_id,
        reasoning_content=given.reasoning_content,
    )


def tool(given: wire.WireTool) -> Tool:
    """One entry of `tools`."""
    function = given.function
    return Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=bool(function.strict),
    )


def _tool_choice(given: str | wire.WireToolChoice | None) -> ToolChoice:
    match given:
        case None:
            return ToolChoice()
        case "none" | "auto" | "required":
            return ToolChoice(mode=given)
        case wire.WireToolChoice(type="function", function=wire.FunctionName(name)):
            return ToolChoice(mode="required", names=(name,))
        case wire.WireToolChoice(type="allowed_tools", allowed_tools=wire.AllowedTools(mode, tools)) if tools:
            return ToolChoice(mode=mode, names=tuple(each.function.name for each in tools))
    raise InvalidRequest("tool_choice names no function", param="tool_choice")


def _continues(body: wire.ChatRequest) -> bool:
    """Does the answer go on with the last message? Unless the request says, it does with the assistant's words."""
    last = body.messages[-1] if body.messages else None
    if body.continue_final_message is not None or body.add_generation_prompt is not None or last is None:
        return bool(body.continue_final_message)
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def _chat_sampling(body: wire.ChatRequest) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.max_tokens == 0 or body.max_completion_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
    return _sampling(body, min(limits, default=None), (body.top_logprobs or 0) if body.logprobs else None)


def _sampling(body: wire.ChoiceFields, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    if body.stream and (body.best_of or 1) > (body.n or 1):
        raise InvalidRequest("best_of over n cannot be streamed: the best are known only at the end", param="best_of")
    if body.stream and body.use_beam_search:
        raise InvalidRequest("a beam search cannot be streamed: its answers are known only at the end", param="stream")
    return sampling(body, max_tokens, logprobs)


def sampling(body: wire.SamplingFields, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """How a body wants tokens to be chosen."""
    names = {each.name for each in msgspec.structs.fields(SamplingParams)}
    given: dict[str, Any] = {
        each.name: tuple(value) if isinstance(value, list) else value
        for each in msgspec.structs.fields(body)
        if each.name in names - {"stop", "logit_bias", "max_tokens", "logprobs"}
        and (value := getattr(body, each.name)) is not None
    }
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=stop,
        logit_bias=_logit_bias(body.logit_bias or {}),
    )


def _unkept(body: wire.ChatRequest) -> dict[str, Any]:
    """What a chat says of itself that nothing is done with: no chat is stored."""
    told = {"metadata": body.metadata, "store": body.store, "service_tier": is_other_tier(body)}
    return {name: value for name, value in told.items() if value}


def open_fields(body: wire.SamplingFields) -> tuple[str, ...]:
    """`Request.left_open` of a body."""
    given = {each.name for each in msgspec.structs.fields(body) if getattr(body, each.name) is not None}
    return left_open(given | {"max_tokens"} if given & _LIMITS else given)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    check_count("logit_bias", given, MAX_LOGIT_BIAS)
    return {token_id(token): bias for token, bias in given.items()}


def token_id(given: str | int) -> int:
    """A key of `logit_bias`."""
    if not _TOKEN_ID.fullmatch(str(given)):  # int() takes much more: " 5", "1_0"
        raise InvalidRequest(f"logit_bias: {str(given)[:40]!r} is not a token id", param="logit_bias")
    return int(given)


def _check_suffix(body: wire.CompletionRequest) -> None:
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not all(isinstance(each, str) for each in prompts):
        raise InvalidRequest("suffix needs prompts that are texts, not ids", param="suffix")
    if body.prompt_logprobs is not None or (body.echo and body.logprobs is not None):
        message = "suffix cannot be used with logprobs of the prompt, which the model reads behind the suffix"
        raise InvalidRequest(message, param="suffix")


def _prompts(base: Request, prompt: str | list[str | int | list[int]]) -> list[Request]:
    """One request per prompt; all of them share one answer."""
    if isinstance(prompt, str):
        return [msgspec.structs.replace(base, prompt=prompt)]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids and len(ids) == len(prompt):
        return [msgspec.structs.replace(base, prompt_ids=tuple(ids))]
    if not prompt or len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: 1 to {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt")
    if ids or len({type(item) for item in prompt}) > 1:
        raise InvalidRequest("prompt: texts, ids and lists of ids cannot be mixed", param="prompt")
    return [
        msgspec.structs.replace(base, id=f"{base.id}-{i}", prompt=item)
        if isinstance(item, str)
        else msgspec.structs.replace(base, id=f"{base.id}-{i}", prompt_ids=tuple(item))  # type: ignore[arg-type]
        for i, item in enumerate(prompt)
    ]


def _card(card: ModelCard) -> replies.ModelCard:
    return replies.ModelCard(
        id=card.id,
        created=card.created,
        max_model_len=card.context,
        weight_bytes=card.weight_bytes,
        display_name=card.id,
        created_at=datetime.fromtimestamp(card.created, UTC),
        max_input_tokens=card.context,
    )
