"""A text -> its vector: which hidden states, of which tokens, cut and normalised how."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pelton.checks import check_ids, check_policy, check_range
from pelton.engine.client import error_of
from pelton.errors import ContextLengthExceeded, InternalError, InvalidRequest
from pelton.request import (
    Accepted,
    Done,
    Embedding,
    EmbeddingParams,
    EngineRequest,
    ErrorEvent,
    Finish,
    Pooling,
    Request,
    SamplingParams,
    TextDelta,
    TextDone,
    TextEmbedding,
    TextEvent,
    TextFinish,
    Truncation,
)

if TYPE_CHECKING:
    from pelton.engine.contract import Engine
    from pelton.prompting import Model


SLACK = 4096
"""Characters of a text that are read beyond those that the tokens it may have can be of: encoding takes over a hundred
bytes of memory for each. Where a text is cut, its last tokens are others than where it goes on."""
_POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
_RANK = 4
"""Values of `pooling_type` in GGUF metadata."""


def pooling_of(metadata: Mapping[str, Any], asked: Pooling | None, setting: Pooling | None) -> Pooling:
    """That of the model's file, if it names one; else what is asked for, what is set, or "last", whose state alone has
    seen all of the text. Raises `InvalidRequest` for another one than the file's, or a model that has none."""
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if kind == _RANK:
        raise InvalidRequest("this model scores pairs of texts: it cannot embed", param="model")
    own = _POOLINGS.get(kind) if isinstance(kind, int) else None
    if own is not None and asked not in (None, own):
        raise InvalidRequest(f"pooling is {asked!r}, but this model is made for {own!r}", param="pooling")
    return own or asked or setting or "last"


class Text(NamedTuple):
    """What is embedded."""

    ids: list[int]
    warnings: tuple[str, ...] = ()
    """What is to be told where that is not all."""


def read(model: Model, request: Request, cut: Truncation | None) -> Text:
    """A request's text, cut where that is asked for. Raises `InvalidRequest`, or `ContextLengthExceeded` for one that
    is too long. It takes a while."""
    context, tokenizer = model.context, model.tokenizer
    limit = context if cut is None else min(cut.limit or context, context)
    keeps_end = cut is not None and cut.keeps == "end"
    given = list(request.prompt_ids or ())
    is_all = True
    if request.prompt_ids is None:
        most = (limit + 1) * tokenizer.max_token_length + SLACK
        text = request.prompt or ""
        is_all = len(text) <= most
        given = tokenizer.encode(text[-most:] if keeps_end else text[:most], add_special=True)
    if not given:
        raise InvalidRequest("the input is empty", param="input")
    count = f"{'' if is_all else 'at least '}{len(given)}"
    if len(given) <= limit:
        check_ids(given, model.vocab_size, "input")
        return Text(given)
    if cut is None:
        message = f"the input has {count} tokens, but the context of this model is {context} tokens"
        raise ContextLengthExceeded(message, param="input")
    kept = given[-limit:] if keeps_end else given[:limit]
    if tokenizer.add_eos and given[-1] == tokenizer.eos_id:  # the model wants it at the end of every text
        kept[-1] = given[-1]
    check_ids(kept, model.vocab_size, "input")
    return Text(kept, (f"cut to {limit} of {count} tokens; the {cut.keeps} was kept",))


def finished(vector: bytes, params: EmbeddingParams) -> bytes:
    """A pooled vector as it was asked for. Its length is exact to the last bit of float64, so that the order in which
    it is added up does not show."""
    values = np.frombuffer(vector, "<f4")[: params.dimensions].astype(np.float64)
    if params.is_normalized:
        length = math.sqrt(math.fsum((values * values).tolist()))  # the squares of float32 are exact in float64
        if length > 0:
            values /= length
    return values.astype("<f4").tobytes()


class Embedder:
    """One model's. `metadata`: of its file; `pooling`: as in the settings."""

    def __init__(self, model: Model, engine: Engine, metadata: Mapping[str, Any], pooling: Pooling | None) -> None:
        self._model = model
        self._engine = engine
        self._metadata = metadata
        self._pooling = pooling

    async def start(self, request: Request, params: EmbeddingParams) -> AsyncGenerator[TextEvent, None]:
        """`Service.generate`, for a text that is embedded."""
        check_policy(request)
        if params.dimensions is not None:
            check_range("dimensions", params.dimensions, 1, self._engine.info.width)
        text = await asyncio.to_thread(read, self._model, request, params.truncation)
        engine_request = EngineRequest(
            id=request.id,
            prompt_ids=text.ids,
            sampling=SamplingParams(max_tokens=0, seed=0),
            pooling=pooling_of(self._metadata, params.pooling, self._pooling),
            priority=request.priority,
            tenant=request.tenant or request.user or "",
            timeout=request.timeout,
            queue_timeout=request.queue_timeout,
            cache_salt=request.cache_salt,
        )
        events = _embed(self._engine, engine_request, params, text.warnings)
        await anext(events)  # The acceptance. From here on, closing `events` aborts the request.
        return events


async def _embed(
    engine: Engine, request: EngineRequest, params: EmbeddingParams, warnings: tuple[str, ...]
) -> AsyncGenerator[TextEvent, None]:
    """First an empty piece, once the engine has accepted the request; then its vector, and its end."""
    events: Any = engine.submit(request)
    async with aclosing(events):
        async for event in events:
            match event:
                case Accepted():
                    yield TextDelta(choice=0, text="")
                case Embedding(vector=vector):
                    yield TextEmbedding(vector=finished(vector, params))
                case Finish(reason=reason):
                    yield TextFinish(choice=0, reason=reason, warnings=warnings)
                case Done(usage=usage, queued=queued):
                    yield TextDone(usage=usage, queued=queued)
                    return
                case ErrorEvent():
                    raise error_of(event)
    raise InternalError("the engine's events ended without a last one")
