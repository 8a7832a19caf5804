"""How the Messages endpoint writes its answers: whole, and as a stream of events; and errors in Anthropic's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pelton.errors import Overloaded, PeltonError
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
from pelton.server import anthropic_types as wire
from pelton.server.answer import ToolCallEvent, arguments_object, ignored_params
from pelton.server.anthropic_cache import Kept
from pelton.server.anthropic_prompt import signature
from pelton.server.context import current
from pelton.server.wire import sse

OVERLOADED = 529
"""Anthropic's status for a server that has too much to do; 429 is for a key that asks too much."""
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""By status; the others under 500 are invalid_request_error, and from there on api_error."""
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn"}


def error_status(error: PeltonError) -> int:
    """The status that an error has in this dialect."""
    return OVERLOADED if isinstance(error, Overloaded) else error.status


def error_body(error: PeltonError) -> wire.MessagesError:
    """An error as Anthropic's clients expect it."""
    status = error_status(error)
    return wire.MessagesError(
        error=wire.MessagesErrorBody(
            type=ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error"),
            message=error.message,
            details=wire.MessagesErrorDetails(error_code=error.code, param=error.param)
            if error.code or error.param
            else None,
        ),
        request_id=current().id,
    )


class MessageReply:
    """Writes one message. A block begins with its first piece and ends where another kind of piece comes."""

    num_choices = 1
    keep_alive = sse(wire.Ping(), "ping")

    def __init__(self, id: str, body: wire.MessagesRequest, extras: dict[str, Any]) -> None:
        self.id = id
        self.model = body.model
        self.is_stream = bool(body.stream)
        self.fingerprint: str | None = None
        self.ignored = ignored_params(extras, wire.NOT_OFFERED)
        self.kept = Kept()
        """Set once the prompt is known."""
        self.is_done = False
        self._max_tokens = body.max_tokens
        self._shows_thoughts = body.thinking is None or body.thinking.display != "omitted"
        self._open: Literal["content", "reasoning", "call"] | None = None
        self._index = -1
        self._thoughts: list[str] = []
        """Of the open block."""
        self._finish: TextFinish | None = None

    # a stream

    def opening(self, index: int) -> bytes:
        """The message without content. What of the prompt was cached is told at its end."""
        usage = self._usage(Usage(prompt_tokens=len(self.kept.ids)), Kept())
        return _event(wire.MessageStart(message=self._message([], None, None, usage))) + self.keep_alive

    def prompt(self, index: int, prompt: TextPrompt) -> bytes:
        """Nothing: a chat is not repeated."""
        return b""

    def delta(self, index: int, delta: TextDelta) -> bytes:
        """A piece of text or of thoughts."""
        if not delta.text:
            return b""
        begun = b"" if self._open == delta.kind else self._begin(delta.kind, _empty(delta.kind))
        if delta.kind == "content":
            return begun + self._piece(wire.TextDelta(text=delta.text))
        self._thoughts.append(delta.text)
        return begun + (self._piece(wire.ThinkingDelta(thinking=delta.text)) if self._shows_thoughts else b"")

    def tool_call(self, index: int, event: ToolCallEvent) -> bytes:
        """The beginning, a piece or the end of a call."""
        match event:
            case ToolCallBegin():
                return self._begin("call", wire.ToolUse(id=event.id, name=event.name, input={}))
            case ToolCallDelta():
                return self._piece(wire.InputDelta(partial_json=event.arguments))
            case ToolCallEnd():
                return self._end()

    def finish(self, index: int, finish: TextFinish) -> bytes:
        """The end of the last block."""
        self._finish = finish
        return self._end()

    async def ending(self, usage: Usage) -> bytes:
        """How the message ended, and what it took."""
        assert self._finish is not None
        self.is_done = True
        end = wire.MessageDelta(
            delta=wire.Stop(stop_reason=self._stop_reason(self._finish, usage), stop_sequence=_stop(self._finish)),
            usage=self._usage(usage, self.kept),
            warnings=self._warnings(self._finish),
        )
        return _event(end) + _event(wire.MessageStop())

    async def failure(self, error: PeltonError) -> bytes:
        """One error event; nothing follows."""
        return _event(error_body(error))

    def _begin(self, kind: Literal["content", "reasoning", "call"], block: wire.AnswerBlock) -> bytes:
        ended = self._end()
        self._open = kind
        self._index += 1
        return ended + _event(wire.BlockStart(index=self._index, content_block=block))

    def _piece(self, delta: wire.TextDelta | wire.ThinkingDelta | wire.SignatureDelta | wire.InputDelta) -> bytes:
        return _event(wire.BlockDelta(index=self._index, delta=delta))

    def _end(self) -> bytes:
        """End the open block, if one is."""
        if self._open is None:
            return b""
        last = b""
        if self._open == "reasoning":
            told = signature("".join(self._thoughts), is_shown=self._shows_thoughts)
            last = self._piece(wire.SignatureDelta(signature=told))
            self._thoughts = []
        self._open = None
        return last + _event(wire.BlockStop(index=self._index))

    # one piece

    async def whole(self, choices: Sequence[Choice], usage: Usage) -> wire.MessageAnswer:
        """The message in one piece."""
        self.is_done = True
        finish = choices[0].ended()
        content = [self._block(part) for part in choices[0].parts]
        stop_reason = self._stop_reason(finish, usage)
        message = self._message(content, stop_reason, _stop(finish), self._usage(usage, self.kept))
        return msgspec.structs.replace(message, warnings=self._warnings(finish))

    def _block(self, part: Part) -> wire.AnswerBlock:
        match part.kind:
            case "content":
                return wire.Text(text=part.text)
            case "reasoning":
                shown = part.text if self._shows_thoughts else ""
                return wire.Thought(thinking=shown, signature=signature(part.text, is_shown=self._shows_thoughts))
            case ToolCallBegin(id=id, name=name):
                return wire.ToolUse(id=id, name=name, input=arguments_object(part.text))

    # both

    def _message(
        self, content: list[wire.AnswerBlock], stop_reason: str | None, stop: str | None, usage: wire.MessageUsage
    ) -> wire.MessageAnswer:
        return wire.MessageAnswer(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop,
            usage=usage,
            ignored_params=self.ignored or msgspec.UNSET,
        )

    def _stop_reason(self, finish: TextFinish, usage: Usage) -> str:
        if _stop(finish) is not None:
            return "stop_sequence"
        if finish.reason == "length" and usage.completion_tokens < self._max_tokens:
            return "model_context_window_exceeded"
        return STOP_REASONS.get(finish.reason, "end_turn")

    def _warnings(self, finish: TextFinish) -> list[str] | msgspec.UnsetType:
        return [*self.kept.warnings, *finish.warnings] or msgspec.UNSET

    def _usage(self, usage: Usage, kept: Kept) -> wire.MessageUsage:
        creation = kept.created(usage)
        created = creation.ephemeral_5m_input_tokens + creation.ephemeral_1h_input_tokens
        return wire.MessageUsage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=usage.cached_tokens,
            cache_creation=creation,
            output_tokens=usage.completion_tokens,
            output_tokens_details=wire.OutputTokensDetails(usage.reasoning_tokens),
        )


def _event(value: msgspec.Struct) -> bytes:
    """An event by the name that its type has."""
    return sse(value, str(value.__struct_config__.tag))


def _empty(kind: Literal["content", "reasoning"]) -> wire.AnswerBlock:
    return wire.Text(text="") if kind == "content" else wire.Thought(thinking="", signature="")


def _stop(finish: TextFinish) -> str | None:
    return finish.stop if isinstance(finish.stop, str) else None
