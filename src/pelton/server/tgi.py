"""The dialect of Hugging Face's text-generation-inference: /generate, /generate_stream and /info."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from pelton import __version__, structured
from pelton.checks import MAX_CHOICES, MAX_STRINGS
from pelton.errors import InvalidRequest
from pelton.pool import StoredModel
from pelton.request import Grammar, Request, SamplingParams
from pelton.server import tgi_types as wire
from pelton.server.answer import answer, left_open, using
from pelton.server.models import Models
from pelton.server.operation import Dialect, get, post
from pelton.server.tgi_reply import TGIReply, error_body, error_status
from pelton.server.wire import JSON, read, unless_gone

PATHS = ("/generate", "/generate_stream", "/info")
DEFAULT_NEW_TOKENS = 100
_SAME = ("repetition_penalty", "frequency_penalty", "top_k", "top_p", "typical_p", "best_of")


def dialect(models: Models) -> Dialect:
    """The dialect over these models."""
    here = _Operations(models)
    operations = (
        post(
            "/generate",
            here.generate,
            "Go on with a text, as text-generation-inference",
            wire.GenerateRequest,
            wire.Generated,
        ),
        post(
            "/generate_stream",
            here.generate_stream,
            "The same, token by token",
            wire.GenerateRequest,
            streams=("text/event-stream",),
        ),
        get("/info", here.info, "What the server can", wire.Info),
    )
    return Dialect(
        operations=operations,
        prefixes=PATHS,
        error_body=error_body,
        error=wire.TGIError,
        error_status=error_status,
    )


class _Operations:
    """What each operation does: gets the request, gives the answer."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def _run(self, http: HTTPRequest, *, is_stream: bool) -> ASGIApp:
        body, extras = await read(http, wire.GenerateRequest)
        asked = body.parameters
        if is_stream and asked.decoder_input_details:
            raise InvalidRequest("decoder_input_details are not part of a stream", param="parameters")
        if is_stream and (asked.best_of or 1) > 1:
            raise InvalidRequest("best_of cannot be streamed: the best is known only at the end", param="parameters")
        async with using(self._models, http, name := await self._models.named(body.model)) as service:
            ids = await unless_gone(http, service.encode_text(body.inputs, add_special=True, is_marked=True))
            request = Request(
                id=f"tgi-{secrets.token_hex(12)}",
                model=name,
                prompt_ids=_last(ids, asked.truncate),
                sampling=_sampling(asked, is_stream=is_stream),
                left_open=_left_open(asked),
                grammar=_grammar(asked.grammar),
            )
            reply = TGIReply(body, extras, request, is_stream=is_stream)
            return await answer(self._models, http, reply, [request])

    async def generate(self, http: HTTPRequest) -> ASGIApp:
        """Go on with a text."""
        return await self._run(http, is_stream=False)

    async def generate_stream(self, http: HTTPRequest) -> ASGIApp:
        """The same, token by token."""
        return await self._run(http, is_stream=True)

    async def info(self, http: HTTPRequest) -> Response:
        """What the server can."""
        name = await self._models.named(http.query_params.get("model"))
        found = await self._models.look_at(name)
        context = found.context or 1
        return JSON(
            wire.Info(
                model_id=name,
                model_sha=None if isinstance(found, StoredModel) else found.fingerprint,
                max_concurrent_requests=0 if isinstance(found, StoredModel) else found.engine.info.max_sequences,
                max_best_of=MAX_CHOICES,
                max_stop_sequences=MAX_STRINGS,
                max_input_tokens=context - 1,
                max_total_tokens=context,
                version=__version__,
            )
        )


def _last(ids: Sequence[int], count: int | None) -> tuple[int, ...]:
    return tuple(ids if count is None else ids[-count:])


def _sampling(asked: wire.Parameters, *, is_stream: bool) -> SamplingParams:
    given = {name: value for name in _SAME if (value := getattr(asked, name)) is not None}
    draws = _draws(asked)
    temperature = 1.0 if asked.temperature is None else asked.temperature
    if asked.temperature is not None and asked.temperature <= 0:
        raise InvalidRequest(f"temperature is {asked.temperature}, must be over 0", param="parameters")
    wants_tokens = is_stream or asked.details or bool(asked.top_n_tokens)
    return SamplingParams(
        **given,
        temperature=temperature if draws else 0.0,
        max_tokens=DEFAULT_NEW_TOKENS if asked.max_new_tokens is None else asked.max_new_tokens,
        seed=(secrets.randbits(63) if asked.seed is None else asked.seed) if draws else None,
        stop=tuple(asked.stop or ()),
        logprobs=(asked.top_n_tokens or 0) if wants_tokens else None,
        prompt_logprobs=0 if asked.decoder_input_details else None,
    )


def _draws(asked: wire.Parameters) -> bool:
    """Is the answer not made of the likeliest tokens?"""
    warps = (asked.temperature, asked.top_k, asked.top_p, asked.typical_p)
    return asked.do_sample or (asked.best_of or 1) > 1 or any(each not in (None, 1.0) for each in warps)


def _left_open(asked: wire.Parameters) -> tuple[str, ...]:
    """What the model's name may bring along: no temperature where none was asked for is 0."""
    names = {"max_new_tokens": "max_tokens"} | {name: name for name in (*_SAME, "temperature", "seed", "stop")}
    given = {ours for name, ours in names.items() if getattr(asked, name) is not None}
    return left_open(given | {"logprobs", "prompt_logprobs"} | (set() if _draws(asked) else {"temperature", "seed"}))


def _grammar(given: wire.GrammarField | None) -> Grammar | None:
    match given:
        case None:
            return None
        case wire.GrammarField(type="regex", value=str(pattern)):
            return structured.regex(pattern, "grammar")
        case wire.GrammarField(type="json", value=value):
            try:
                schema = msgspec.json.decode(value) if isinstance(value, str) else value
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"parameters.grammar.value is not JSON: {error}", param="grammar") from None
            if isinstance(schema, dict | bool):
                return structured.json_schema(schema, "grammar")
    raise InvalidRequest("parameters.grammar.value is neither a schema nor a pattern", param="grammar")
