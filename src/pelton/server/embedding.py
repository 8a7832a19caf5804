"""Embeddings, whatever the dialect: texts or ids -> vectors, each by a request of its own."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from starlette.requests import Request as HTTPRequest

from pelton.checks import MAX_INPUTS
from pelton.errors import InvalidRequest, Overloaded
from pelton.folding import Embedded, all_of, embedded_of, summed
from pelton.request import Request, TextEvent, Usage
from pelton.server.models import Models
from pelton.server.wire import unless_gone

if TYPE_CHECKING:
    from pelton.service import Service

MAX_WARNINGS = 32
Inputs = Sequence[str | Sequence[int]]
"""Texts, and ids of texts."""


class Vectors(NamedTuple):
    """What became of some inputs."""

    vectors: list[bytes]
    """In their order: float32, little-endian."""
    usage: Usage
    warnings: list[str]
    """Each with its input."""


def floats(vector: bytes) -> list[float]:
    """A vector's values."""
    return array("f", vector).tolist()


def inputs_of(given: str | list[str | int | list[int]], param: str) -> Inputs:
    """A text, texts, the ids of one text, or those of several. Raises `InvalidRequest` for none, too many, empty ones,
    or kinds that are mixed. `param`: the field that they stand in."""
    inputs: Inputs
    if isinstance(given, str):
        inputs = [given]
    elif given and all(isinstance(each, int) for each in given):
        inputs = [given]  # type: ignore[list-item]
    elif len({type(each) for each in given}) == 1:
        inputs = given  # type: ignore[assignment]
    elif given:
        raise InvalidRequest(f"{param}: texts, ids and lists of ids cannot be mixed", param=param)
    else:
        inputs = []
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidRequest(f"{param}: 1 to {MAX_INPUTS} inputs, got {len(inputs)}", param=param)
    for i, each in enumerate(inputs):
        if not each:
            raise InvalidRequest(f"{param}[{i}] is empty: it cannot be embedded", param=param)
    return inputs


async def embed_all(models: Models, http: HTTPRequest, service: Service, base: Request, inputs: Inputs) -> Vectors:
    """Embed all inputs as `base` says. What is wrong with any of them is raised, and ends the others."""
    requests = [
        msgspec.structs.replace(base, id=f"{base.id}-{i}", prompt=each)
        if isinstance(each, str)
        else msgspec.structs.replace(base, id=f"{base.id}-{i}", prompt_ids=tuple(each))
        for i, each in enumerate(inputs)
    ]
    answers = await unless_gone(http, _all(models, service, requests))
    usage = Usage()
    for each in answers:
        usage = summed(usage, each.usage)
    warnings = [f"input[{i}]: {warning}" for i, each in enumerate(answers) for warning in each.warnings]
    if len(warnings) > MAX_WARNINGS:
        warnings[MAX_WARNINGS:] = [f"... and {len(warnings) - MAX_WARNINGS} more"]
    return Vectors([each.vector for each in answers], usage, warnings)


async def _all(models: Models, service: Service, requests: Sequence[Request]) -> list[Embedded]:
    """As many at once as the engine runs: more would only fill its queue."""
    slots = asyncio.Semaphore(service.engine.info.max_sequences)
    num_done = 0

    async def one(index: int, request: Request) -> Embedded:
        nonlocal num_done
        try:
            async with slots, aclosing(await begun(request)) as events:
                embedded = await embedded_of(events)
        except InvalidRequest as error:
            if error.param != "input":
                raise
            raise type(error)(f"input[{index}]: {error.message}", param=error.param) from None
        num_done += 1
        return embedded

    async def begun(request: Request) -> AsyncGenerator[TextEvent, None]:
        while True:
            try:
                return await models.meter.begin(service, request)
            except Overloaded as error:
                if not num_done:
                    raise
                await asyncio.sleep(error.retry_after or 1.0)  # some are done: the others wait for their room

    return await all_of(one(i, request) for i, request in enumerate(requests))
