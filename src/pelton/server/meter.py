"""The one way in which the server starts a request: on its key's account, and measured."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from pelton.request import Request, TextDelta, TextDone, TextEvent, Usage
from pelton.server.context import Context, current
from pelton.server.ledger import Ledger

if TYPE_CHECKING:
    from pelton.service import Service

CHARACTERS_PER_TOKEN = 4
"""What is reckoned with before a prompt was encoded."""


class Meter:
    """Counts what requests use."""

    def __init__(self, ledger: Ledger | None) -> None:
        self._ledger = ledger

    async def begin(self, service: Service, request: Request) -> AsyncGenerator[TextEvent, None]:
        """`service.generate` on behalf of the caller. Raises `RateLimited` where its key has no tokens left."""
        context = current()
        if context.key.id:
            request = msgspec.structs.replace(request, tenant=context.key.id)
        expected = expected_usage(request)
        reserved = await context.limits.take("tokens", expected.prompt_tokens + expected.completion_tokens)
        watch = _Watch(self._ledger, context, service.name, expected, reserved)
        try:
            events = watch.over(await service.generate(request))
            await anext(events)  # From here on, closing `events` closes what it watches.
        except BaseException:
            context.limits.settle("tokens", -reserved)
            raise
        return events


class _Watch:
    """One request under way."""

    def __init__(self, ledger: Ledger | None, context: Context, model: str, expected: Usage, reserved: int) -> None:
        self._ledger = ledger
        self._context = context
        self._model = model
        self._expected = expected
        self._reserved = reserved
        self._num_tokens = 0

    async def over(self, events: AsyncGenerator[TextEvent, None]) -> AsyncGenerator[TextEvent, None]:
        """First an empty piece; then the events as they are."""
        usage: Usage | None = None
        try:
            async with aclosing(events):
                yield TextDelta(choice=0, text="")
                async for event in events:
                    match event:
                        case TextDelta(token_ids=ids):
                            self._num_tokens += len(ids)
                        case TextDone():
                            usage = event.usage
                    yield event
        finally:
            self._end(usage)

    def _end(self, usage: Usage | None) -> None:
        """`usage`: None where the request did not end well; then it is known only in part."""
        is_failed = usage is None
        if usage is None:
            usage = Usage(prompt_tokens=self._expected.prompt_tokens, completion_tokens=self._num_tokens)
        context = self._context
        if self._ledger is not None and context.key.id:
            self._ledger.add(context.key.id, self._model, usage, is_failed=is_failed)
        context.limits.settle("tokens", usage.prompt_tokens + usage.completion_tokens - self._reserved)


def expected_usage(request: Request) -> Usage:
    """What a request may come to, reckoned from the length of its prompt and from `max_tokens`."""
    if request.prompt_ids is not None:
        num_prompt = len(request.prompt_ids)
    else:
        texts = [request.prompt or ""]
        for message in request.messages or ():
            parts = message.content if isinstance(message.content, tuple) else ()
            texts += [message.content] if isinstance(message.content, str) else [str(p.get("text", "")) for p in parts]
        num_prompt = -(-sum(map(len, texts)) // CHARACTERS_PER_TOKEN)
    made = request.sampling.best_of or request.sampling.n
    return Usage(prompt_tokens=num_prompt, completion_tokens=made * (request.sampling.max_tokens or 0))
