"""How Ollama's answers are written: whole, and as a stream of lines; and errors in its form."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pelton.errors import PeltonError
from pelton.folding import Choice, warnings_of
from pelton.request import TextDelta, TextFinish, TextPrompt, TokenText, ToolCall, ToolCallEnd, Usage
from pelton.server import ollama_types as wire
from pelton.server.answer import ToolCallEvent, arguments_object
from pelton.server.context import current
from pelton.server.wire import json_line

DONE_REASONS = {"length": "length", "abort": "abort"}
"""All others are "stop"."""


def error_body(error: PeltonError) -> wire.OllamaError:
    """An error as Ollama's clients expect it."""
    return wire.OllamaError(error=error.message)


def timestamp(seconds: float | None = None) -> str:
    """A time as Ollama writes it; None: now. `seconds`: since 1970."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


class _Reply:
    """What both ways to answer have."""

    num_choices = 1
    keep_alive = b""

    def __init__(self, body: wire.Common, ignored: list[str]) -> None:
        self.model = body.model
        self.is_stream = body.stream is not False
        self.fingerprint: str | None = None
        self.load_seconds = 0.0
        """What the model's load took, set once it is there."""
        self.loaded_at = 0.0
        """When the model was there, by `time.perf_counter`."""
        self.warnings: tuple[str, ...] = ()
        """What the client should know beside what the answer's end says."""
        self._ignored = ignored
        self._choice = Choice()
        """What has been streamed."""

    def opening(self, index: int) -> bytes:
        """Nothing."""
        return b""

    def prompt(self, index: int, prompt: TextPrompt) -> bytes:
        """Nothing: a prompt is not repeated."""
        return b""

    def delta(self, index: int, delta: TextDelta) -> bytes:
        """A line of text or of thoughts."""
        self._choice.add(delta)
        if not delta.text and not delta.tokens:
            return b""
        shown = {delta.kind: delta.text}
        return json_line(self._line(shown.get("content", ""), shown.get("reasoning"), (), delta.tokens))

    def tool_call(self, index: int, event: ToolCallEvent) -> bytes:
        """A line for each whole call."""
        if not isinstance(event, ToolCallEnd):
            self._choice.add(event)
            return b""
        calls = self._choice.tool_calls
        return json_line(self._line("", None, [(len(calls) - 1, calls[-1])], ()))

    def finish(self, index: int, finish: TextFinish) -> bytes:
        """Nothing: the last line comes when all is counted."""
        self._choice.add(finish)
        return b""

    async def ending(self, usage: Usage) -> bytes:
        """The last line, with what it took."""
        return json_line(self._line("", None, (), (), **self._end(self._choice, usage)))

    async def failure(self, error: PeltonError) -> bytes:
        """A line with the error; nothing follows."""
        return json_line(error_body(error))

    async def whole(self, choices: Sequence[Choice], usage: Usage) -> wire.Piece:
        """The answer in one piece."""
        choice = choices[0]
        calls = list(enumerate(choice.tool_calls))
        return self._line(choice.text, choice.reasoning or None, calls, choice.tokens, **self._end(choice, usage))

    def idle(self, reason: str) -> wire.Piece:
        """The answer of a request that only loads or unloads."""
        return self._line("", None, (), (), done=True, done_reason=reason)

    def _line(
        self,
        text: str,
        thoughts: str | None,
        calls: Sequence[tuple[int, ToolCall]],
        tokens: Sequence[TokenText],
        *,
        done: bool = False,
        **end: Any,
    ) -> wire.Piece:
        raise NotImplementedError

    def _end(self, choice: Choice, usage: Usage) -> dict[str, Any]:
        finish, now = choice.ended(), time.perf_counter()
        first = choice.began_at or now
        return {
            "done": True,
            "done_reason": DONE_REASONS.get(finish.reason, "stop"),
            "total_duration": nanoseconds(now - current().began),
            "load_duration": nanoseconds(self.load_seconds),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - self.loaded_at),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(choice.ended_at - first),
            "ignored_params": self._ignored or None,
            "warnings": [*self.warnings, *warnings_of([choice])] or None,
        }


class ChatReply(_Reply):
    """Writes an answer of /api/chat."""

    def _line(
        self,
        text: str,
        thoughts: str | None,
        calls: Sequence[tuple[int, ToolCall]],
        tokens: Sequence[TokenText],
        *,
        done: bool = False,
        **end: Any,
    ) -> wire.Piece:
        message = wire.OllamaAnswerMessage(
            role="assistant", content=text, thinking=thoughts, tool_calls=[_call(*each) for each in calls] or None
        )
        return wire.OllamaChatAnswer(
            model=self.model, created_at=timestamp(), done=done, message=message, logprobs=_logprobs(tokens), **end
        )


class GenerateReply(_Reply):
    """Writes an answer of /api/generate. `prompt_ids`: the prompt, where the answer's `context` is to hold it."""

    prompt_ids: list[int] | None = None

    def _line(
        self,
        text: str,
        thoughts: str | None,
        calls: Sequence[tuple[int, ToolCall]],
        tokens: Sequence[TokenText],
        *,
        done: bool = False,
        **end: Any,
    ) -> wire.Piece:
        return wire.OllamaGeneration(
            model=self.model,
            created_at=timestamp(),
            done=done,
            response=text,
            thinking=thoughts,
            tool_calls=[_call(*each) for each in calls] or None,
            logprobs=_logprobs(tokens),
            **end,
        )

    def _end(self, choice: Choice, usage: Usage) -> dict[str, Any]:
        context = None if self.prompt_ids is None else [*self.prompt_ids, *choice.token_ids]
        return {**super()._end(choice, usage), "context": context}


def nanoseconds(seconds: float) -> int:
    """As durations are told; none is negative."""
    return round(max(seconds, 0.0) * 1e9)


def _call(index: int, call: ToolCall) -> wire.OllamaCall:
    called = wire.OllamaCalled(index=index, name=call.name, arguments=arguments_object(call.arguments))
    return wire.OllamaCall(id=call.id, function=called)


def _logprobs(tokens: Sequence[TokenText]) -> list[wire.OllamaLogprob] | None:
    return [
        wire.OllamaLogprob(
            token=each.text,
            logprob=each.logprob,
            bytes=list(each.bytes),
            top_logprobs=[
                wire.OllamaLikely(token=top.text, logprob=top.logprob, bytes=list(top.bytes)) for top in each.top
            ],
        )
        for each in tokens
    ] or None
