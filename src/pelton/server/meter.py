"""The one way in which the server starts a request: on its key's account, and measured."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from pelton.logs import fields
from pelton.request import IDLE, Request, TextDelta, TextDone, TextEvent, TextFinish, Usage
from pelton.server.context import Context, current
from pelton.server.ledger import Ledger
from pelton.server.metrics import Metrics, ModelMetrics
from pelton.server.tracing import Trace, Tracer

if TYPE_CHECKING:
    from pelton.service import Service

log = logging.getLogger("pelton.prompts")
BYTES_PER_TOKEN = 4
"""What is reckoned with before a prompt was encoded."""
RESERVE = 2048
"""Tokens of a choice that are reckoned with where its request sets no bound, and then as often as they are used up."""


class Meter:
    """Counts what requests use, and measures what they take."""

    def __init__(
        self, ledger: Ledger | None, metrics: Metrics, tracer: Tracer | None = None, *, logs_prompts: bool = False
    ) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._tracer = tracer
        self._logs_prompts = logs_prompts

    async def begin(self, service: Service, request: Request) -> AsyncGenerator[TextEvent, None]:
        """`service.generate` on behalf of the caller. Raises `RateLimited` where its key has no tokens left."""
        context = current()
        if context.key.id:
            request = msgspec.structs.replace(request, tenant=context.key.id)
        if context.is_idle_priority:
            request = at_idle_priority(request)
        expected = expected_usage(request, service.context)
        reserved = await context.limits.take("tokens", expected.prompt_tokens + expected.completion_tokens)
        trace = None if self._tracer is None else self._tracer.start(request, service.name, context.trace)
        watch = _Watch(self._ledger, self._metrics.of(service.name), context, service.name, expected, reserved, trace)
        if self._logs_prompts:
            log.info("prompt", extra=fields(model=service.name, prompt=_prompt(request)))
        try:
            events = watch.over(await service.generate(request))
            await anext(events)  # From here on, closing `events` closes what it watches.
        except BaseException as error:
            context.limits.settle("tokens", -reserved)
            if trace is not None:
                trace.end(Usage(), set(), failure=type(error).__name__)
            raise
        return events


class _Watch:
    """One request under way."""

    def __init__(
        self,
        ledger: Ledger | None,
        metrics: ModelMetrics,
        context: Context,
        model: str,
        expected: Usage,
        reserved: int,
        trace: Trace | None,
    ) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._context = context
        self._model = model
        self._expected = expected
        self._reserved = reserved
        self._trace = trace
        self._is_timed = not context.is_idle_priority  # nobody waits for those: their times would hide the others'
        self._num_tokens = 0
        self._first: float | None = None
        """When the first token came."""
        self._last: dict[int, float] = {}
        """When each choice's last piece came."""
        self._reasons: set[str] = set()

    async def over(self, events: AsyncGenerator[TextEvent, None]) -> AsyncGenerator[TextEvent, None]:
        """First an empty piece; then the events as they are."""
        done: TextDone | None = None
        try:
            async with aclosing(events):
                yield TextDelta(choice=0, text="")
                async for event in events:
                    match event:
                        case TextDelta():
                            if event.token_ids:
                                self._count(event)
                        case TextFinish():
                            self._reasons.add(event.reason)
                        case TextDone():
                            done = event
                    yield event
        except Exception:
            self._reasons.add("error")
            raise
        finally:
            self._end(done)

    def _count(self, delta: TextDelta) -> None:
        now = perf_counter()
        self._num_tokens += len(delta.token_ids)
        if self._expected.prompt_tokens + self._num_tokens > self._reserved:
            self._reserve_more()
        self._metrics.completion.inc(len(delta.token_ids))
        last = self._last.get(delta.choice)
        self._last[delta.choice] = now
        if last is not None:
            if self._is_timed:
                self._metrics.between.observe(now - last)
        elif self._first is None:
            self._first = now
            if self._is_timed:
                self._metrics.first.observe(now - self._context.began)
            if self._trace is not None:
                self._trace.first_token()

    def _reserve_more(self) -> None:
        """It is longer than was reckoned with: what it will have used is not there for others."""
        self._reserved += RESERVE
        self._context.limits.settle("tokens", RESERVE)

    def _end(self, done: TextDone | None) -> None:
        """`done`: None where the request did not end well; then its usage is known only in part."""
        context, began = self._context, self._context.began
        if done is None:
            usage = Usage(prompt_tokens=self._expected.prompt_tokens, completion_tokens=self._num_tokens)
        else:
            usage = done.usage
            to_first = None if self._first is None else self._first - began
            self._metrics.done(usage)
            if self._is_timed:
                self._metrics.took(done, seconds=perf_counter() - began, to_first=to_first)
        reason = _reason(self._reasons, is_done=done is not None)
        self._metrics.finished(reason)
        context.add_usage(self._model, usage)
        if self._trace is not None:
            self._trace.end(usage, {*self._reasons}, failure=None if done is not None else reason)
        if self._ledger is not None and context.key.id:
            self._ledger.add(context.key.id, self._model, usage, is_failed=done is None)
        context.limits.settle("tokens", usage.prompt_tokens + usage.completion_tokens - self._reserved)


def _prompt(request: Request) -> Any:
    """What a request asks, as the log tells it."""
    if request.messages is not None:
        return msgspec.to_builtins(request.messages)
    return request.prompt if request.prompt is not None else list(request.prompt_ids or ())


def _reason(reasons: set[str], *, is_done: bool) -> str:
    """How a request has ended, of how its choices have: the last of these that one of them has."""
    if not is_done:
        return "error" if "error" in reasons else "abort"
    return next((each for each in ("error", "abort", "length", "tool_calls") if each in reasons), "stop")


def expected_usage(request: Request, context: int) -> Usage:
    """What a request may come to, reckoned from the length of its prompt, and from `max_tokens` and what the context
    has left."""
    num_prompt = min(_num_prompt(request), context)
    if request.embedding is not None:
        return Usage(prompt_tokens=num_prompt)
    asked = request.sampling.max_tokens
    most = min(RESERVE if asked is None else asked, context - num_prompt)
    sampling = request.sampling
    made = max(sampling.best_of or sampling.n, (sampling.beam_width or 0) if sampling.use_beam_search else 0)
    return Usage(prompt_tokens=num_prompt, completion_tokens=made * most)


def _num_prompt(request: Request) -> int:
    if request.prompt_ids is not None:
        return len(request.prompt_ids)
    texts = [request.prompt or "", request.suffix or ""]
    for message in request.messages or ():
        parts = message.content if isinstance(message.content, tuple) else ()
        texts += [message.content] if isinstance(message.content, str) else [str(p.get("text", "")) for p in parts]
    num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
    num_bytes += len(msgspec.json.encode(request.tools)) if request.tools else 0
    return -(-num_bytes // BYTES_PER_TOKEN)


def at_idle_priority(request: Request) -> Request:
    """The request, where it gets what nobody else needs, and so may take any time."""
    return msgspec.structs.replace(
        request,
        priority=IDLE,
        tenant=f"idle work of {request.tenant or request.user or ''}",  # what it gets is not held against its owner
        timeout=math.inf if request.timeout is None else request.timeout,
        queue_timeout=math.inf if request.queue_timeout is None else request.queue_timeout,
    )
