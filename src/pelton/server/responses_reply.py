"""How /v1/responses writes its answers: whole, and as a stream of events; and errors, in OpenAI's form."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from pelton.errors import InvalidRequest, PeltonError
from pelton.folding import Choice, Part
from pelton.request import (
    TextDelta,
    TextFinish,
    TextPrompt,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    Usage,
)
from pelton.server import openai_reply
from pelton.server import responses_events as events
from pelton.server import responses_types as wire
from pelton.server.answer import ToolCallEvent
from pelton.server.openai_reply_types import ErrorAnswer
from pelton.server.responses_prompt import item_id
from pelton.server.wire import KEEP_ALIVE, sse

_STATUS: dict[str, wire.Status] = {"length": "incomplete", "abort": "cancelled"}
"""By how a choice ended; all others are completed."""

Keep = Callable[[wire.Response], Awaitable[wire.Response]]
"""Stores a response that has ended, and gives it as it is told."""


def error_body(error: PeltonError) -> ErrorAnswer:
    """An error as OpenAI's clients expect it."""
    told = openai_reply.error_body(error).error
    return ErrorAnswer(error=msgspec.structs.replace(told, param=_param(error)))


def response_error(error: PeltonError) -> wire.ResponseError:
    """An error as a response holds it."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    if isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    return wire.ResponseError(code=code, message=error.message, type=error.type, param=_param(error))


def _param(error: PeltonError) -> str | None:
    """What a chat calls messages is the input here."""
    return "input" if error.param == "messages" else error.param


class ResponseReply:
    """Writes one response. An item begins with its first piece and ends where another one begins."""

    num_choices = 1
    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        base: wire.Response,
        *,
        num_input: int,
        is_stream: bool,
        keep: Keep,
        log: Callable[[bytes], None] = lambda event: None,
    ) -> None:
        """`base`: what is known at the start. `num_input`: items of the request, which have the first ids. `keep` is
        awaited with the whole response before its end is told; `log` hears of each event."""
        self.is_stream = is_stream
        self.fingerprint: str | None = None
        self._base = base
        self._num_input = num_input
        self._keep = keep
        self._log = log
        self._choice = Choice()
        self._num_events = 0
        self._is_open = False
        """Has the last item begun, and not ended?"""
        self._num_told = 0
        """Tokens of the open item's text whose logprobs are out."""

    # a stream

    def queued(self) -> bytes:
        """What a background response's stream begins with."""
        self._base = msgspec.structs.replace(self._base, status="queued")
        return self._event(events.Created(response=self.now())) + self._event(events.Queued(response=self.now()))

    def opening(self, index: int) -> bytes:
        """The response without output."""
        is_first = self._base.status != "queued"
        self._base = msgspec.structs.replace(self._base, status="in_progress", system_fingerprint=self.fingerprint)
        begun = self._event(events.Created(response=self.now())) if is_first else b""
        return begun + self._event(events.InProgress(response=self.now()))

    def prompt(self, index: int, prompt: TextPrompt) -> bytes:
        """Nothing: a prompt is not repeated."""
        return b""

    def delta(self, index: int, delta: TextDelta) -> bytes:
        """A piece of text or of thoughts."""
        num_parts = len(self._choice.parts)
        self._choice.add(delta)
        if not delta.text:
            return b""
        begun = self._begin() if len(self._choice.parts) > num_parts else b""
        i, part = self._last()
        if part.kind == "reasoning":
            said = events.ReasoningDelta(output_index=i, item_id=self._id(i, part), delta=delta.text)
            return begun + self._event(said)
        logprobs = openai_reply.token_logprobs(part.tokens[self._num_told :])
        self._num_told = len(part.tokens)
        return begun + self._event(
            events.TextDelta(output_index=i, item_id=self._id(i, part), delta=delta.text, logprobs=logprobs)
        )

    def tool_call(self, index: int, event: ToolCallEvent) -> bytes:
        """The beginning, a piece or the end of a call."""
        ended = self._end("completed") if isinstance(event, ToolCallBegin) else b""
        self._choice.add(event)
        match event:
            case ToolCallBegin():
                return ended + self._begin()
            case ToolCallDelta():
                i, part = self._last()
                return self._event(
                    events.ArgumentsDelta(output_index=i, item_id=self._id(i, part), delta=event.arguments)
                )
            case ToolCallEnd():
                return self._end("completed")

    def finish(self, index: int, finish: TextFinish) -> bytes:
        """The end of the last item."""
        self._choice.add(finish)
        begun = b"" if self._choice.parts else self._begin_nothing()
        return begun + self._end(_item_status(finish))

    async def ending(self, usage: Usage) -> bytes:
        """The whole response, once it is stored."""
        response = await self._keep(self._ended(usage))
        last = {"completed": events.Completed, "incomplete": events.Incomplete}.get(response.status, events.Failed)
        return self._event(last(response=response))

    async def failure(self, error: PeltonError) -> bytes:
        """What went wrong, and the response as far as it came, once that is stored."""
        failed = await self._keep(self._broken(status="failed", error=response_error(error)))
        told = events.Error(code=error.code, message=error.message, param=_param(error))
        return self._event(told) + self._event(events.Failed(response=failed))

    async def cancel(self) -> None:
        """End it as far as it came."""
        self._event(events.Failed(response=await self._keep(self._broken(status="cancelled"))))

    def _event(self, event: events.Event) -> bytes:
        event.sequence_number = self._num_events
        self._num_events += 1
        written = sse(event, str(event.__struct_config__.tag))
        self._log(written)
        return written

    def _last(self) -> tuple[int, Part]:
        return len(self._choice.parts) - 1, self._choice.parts[-1]

    def _begin_nothing(self) -> bytes:
        """An answer without a token is an empty message."""
        self._choice.parts.append(Part("content"))
        return self._begin()

    def _begin(self) -> bytes:
        """The item of the choice's last part begins; the one before that has ended."""
        i, part = self._last()
        ended = self._end("completed", i - 1)
        self._is_open = True
        self._num_told = 0
        empty = self._item(i, Part(part.kind), "in_progress")
        if isinstance(empty, wire.Message):
            empty = msgspec.structs.replace(empty, content=[])
        begun = ended + self._event(events.ItemAdded(output_index=i, item=empty))
        if isinstance(part.kind, ToolCallBegin):
            return begun
        content = wire.OutputText(text="") if part.kind == "content" else wire.ReasoningText(text="")
        return begun + self._event(events.PartAdded(output_index=i, item_id=empty.id, part=content))

    def _end(self, status: wire.ItemStatus, index: int = -1) -> bytes:
        """End the open item, if one is: that of the choice's last part, or of another one."""
        if not self._is_open:
            return b""
        self._is_open = False
        i = index % len(self._choice.parts)
        item = self._item(i, self._choice.parts[i], status)
        place: dict[str, Any] = {"output_index": i, "item_id": item.id}
        done: list[events.Event] = []
        match item:
            case wire.Message(content=[wire.OutputText() as text]):
                done.append(events.TextDone(**place, text=text.text, logprobs=text.logprobs))
                done.append(events.PartDone(**place, part=text))
            case wire.ReasoningItem(content=[thoughts]):
                done.append(events.ReasoningDone(**place, text=thoughts.text))
                done.append(events.PartDone(**place, part=thoughts))
            case wire.FunctionCall(name=name, arguments=arguments):
                done.append(events.ArgumentsDone(**place, name=name, arguments=arguments))
        done.append(events.ItemDone(output_index=i, item=item))
        return b"".join(map(self._event, done))

    # one piece

    async def whole(self, choices: Sequence[Choice], usage: Usage) -> wire.Response:
        """The response in one piece, once it is stored."""
        self._choice = choices[0]
        if not self._choice.parts:
            self._choice.parts.append(Part("content"))
        return await self._keep(self._ended(usage))

    # both

    def now(self) -> wire.Response:
        """The response as far as it came."""
        return msgspec.structs.replace(self._base, output=self._output("in_progress"))

    def _broken(self, *, status: wire.Status, error: wire.ResponseError | None = None) -> wire.Response:
        return msgspec.structs.replace(self._base, status=status, error=error, output=self._output("incomplete"))

    def _ended(self, usage: Usage) -> wire.Response:
        finish = self._choice.ended()
        status = _STATUS.get(finish.reason, "completed")
        warnings = [*(self._base.warnings or ()), *finish.warnings]
        return msgspec.structs.replace(
            self._base,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=wire.IncompleteDetails() if status == "incomplete" else None,
            output=self._output(_item_status(finish)),
            usage=_usage(usage),
            system_fingerprint=self.fingerprint,
            warnings=warnings or msgspec.UNSET,
        )

    def _output(self, last: wire.ItemStatus) -> list[wire.OutputItem]:
        """All items. `last`: how the last one stands."""
        parts = self._choice.parts
        return [self._item(i, part, last if i == len(parts) - 1 else "completed") for i, part in enumerate(parts)]

    def _item(self, index: int, part: Part, status: wire.ItemStatus) -> wire.OutputItem:
        id = self._id(index, part)
        match part.kind:
            case "content":
                text = wire.OutputText(text=part.text, logprobs=openai_reply.token_logprobs(part.tokens))
                return wire.Message(id=id, role="assistant", status=status, content=[text])
            case "reasoning":
                return wire.ReasoningItem(id=id, status=status, content=[wire.ReasoningText(text=part.text)])
            case ToolCallBegin(id=call_id, name=name):
                stands = status if status == "in_progress" else _call_status(part.text)
                return wire.FunctionCall(id=id, status=stands, call_id=call_id, name=name, arguments=part.text)

    def _id(self, index: int, part: Part) -> str:
        prefix = {"content": "msg", "reasoning": "rs"}.get(str(part.kind), "fc")
        return item_id(prefix, self._base.id, self._num_input + index)


def _item_status(finish: TextFinish) -> wire.ItemStatus:
    return "completed" if finish.reason in ("stop", "tool_calls") else "incomplete"


def _call_status(arguments: str) -> wire.ItemStatus:
    """A call whose arguments are whole is complete, also where the answer was cut behind it."""
    try:
        msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return "incomplete"
    return "completed"


def _usage(usage: Usage) -> wire.ResponseUsage:
    return wire.ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=wire.InputTokensDetails(
            cached_tokens=usage.cached_tokens, cache_write_tokens=usage.prompt_tokens - usage.cached_tokens
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=wire.OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
