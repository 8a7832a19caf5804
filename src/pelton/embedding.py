"""A text -> its vector: which hidden states, of which tokens, cut and normalised how."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import numpy as np

from pelton.engine.client import error_of
from pelton.errors import InternalError, InvalidRequest
from pelton.request import (
    Accepted,
    Done,
    Embedding,
    EmbeddingParams,
    EngineRequest,
    ErrorEvent,
    Finish,
    Pooling,
    TextDelta,
    TextDone,
    TextEmbedding,
    TextEvent,
    TextFinish,
    Truncation,
)

if TYPE_CHECKING:
    from pelton.service import Engine

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


def truncated(
    ids: list[int], truncation: Truncation | None, context: int, last: int | None
) -> tuple[list[int], tuple[str, ...]]:
    """The ids as far as they may go, and what is to be told of it. `last`: the token that the model wants at the end of
    every text, which stays there."""
    if truncation is None:
        return ids, ()
    limit = context if truncation.limit is None else min(truncation.limit, context)
    if len(ids) <= limit:
        return ids, ()
    if truncation.keeps == "end":
        kept = ids[-limit:]
    elif last is not None and ids[-1] == last:
        kept = [*ids[: limit - 1], last]
    else:
        kept = ids[:limit]
    return kept, (f"a text was cut to {limit} of its {len(ids)} tokens, of which the {truncation.keeps} was kept",)


def finished(vector: bytes, params: EmbeddingParams) -> bytes:
    """A pooled vector as it was asked for. Its length is exact to the last bit of float64, so that the order in which
    it is added up does not show."""
    values = np.frombuffer(vector, "<f4")[: params.dimensions].astype(np.float64)
    if params.is_normalized:
        length = math.sqrt(math.fsum((values * values).tolist()))  # the squares of float32 are exact in float64
        if length > 0:
            values /= length
    return values.astype("<f4").tobytes()


async def embed(
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
