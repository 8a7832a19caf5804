"""How text-generation-inference's answers are written: whole, and as a stream of tokens; and errors in its form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pelton.errors import InternalError, InvalidRequest, PeltonError
from pelton.folding import Choice, warnings_of
from pelton.request import Request, TextDelta, TextFinish, TextPrompt, TokenText, Usage
from pelton.server import tgi_types as wire
from pelton.server.answer import ToolCallEvent, ignored_params
from pelton.server.wire import KEEP_ALIVE, sse

ERROR_TYPES = {
    401: "authentication",
    403: "permission",
    404: "not_found",
    422: "validation",
    429: "overloaded",
    503: "overloaded",
}
"""By status; the others are "generation"."""


def error_status(error: PeltonError) -> int:
    """The status that an error has in this dialect: what is wrong with a request is 422."""
    return 422 if isinstance(error, InvalidRequest) and error.status == 400 else error.status


def error_body(error: PeltonError) -> wire.TGIError:
    """An error as clients of text-generation-inference expect it."""
    return wire.TGIError(error=error.message, error_type=ERROR_TYPES.get(error_status(error), "generation"))


class TGIReply:
    """Writes one answer. A stream has an event for each token; the last one waits for the end, which it tells."""

    keep_alive = KEEP_ALIVE
    num_choices = 1

    def __init__(
        self, body: wire.GenerateRequest, extras: dict[str, Any], request: Request, *, is_stream: bool
    ) -> None:
        self.is_stream = is_stream
        self.fingerprint: str | None = None
        self._asked = body.parameters
        self._begin = body.inputs if body.parameters.return_full_text else ""
        self._ignored = ignored_params(extras, wire.NOT_OFFERED)
        self._seed = request.sampling.seed if request.sampling.temperature else None
        self._prompt_ids = request.prompt_ids or ()
        self._choice = Choice()
        self._held: TokenText | None = None
        self._index = 0

    def opening(self, index: int) -> bytes:
        """Nothing."""
        return b""

    def prompt(self, index: int, prompt: TextPrompt) -> bytes:
        """Nothing: it is part of whole answers alone."""
        return b""

    def delta(self, index: int, delta: TextDelta) -> bytes:
        """An event for each token but the last one so far."""
        self._choice.add(delta)
        events = b""
        for token in delta.tokens:
            events += self._release()
            self._held = token
        return events

    def tool_call(self, index: int, event: ToolCallEvent) -> bytes:
        """Never: a completion calls nothing."""
        raise InternalError("a completion has called a tool")

    def finish(self, index: int, finish: TextFinish) -> bytes:
        """The last token, with the whole text and how it ended."""
        self._choice.add(finish)
        details = wire.StreamDetails(
            finish_reason=_reason(finish),
            generated_tokens=len(self._choice.token_ids),
            input_length=len(self._prompt_ids),
            seed=self._seed,
        )
        return self._release(
            generated_text=self._begin + self._choice.text,
            details=details,
            ignored_params=self._ignored or msgspec.UNSET,
            warnings=warnings_of([self._choice]) or msgspec.UNSET,
        )

    async def ending(self, usage: Usage) -> bytes:
        """Nothing."""
        return b""

    async def failure(self, error: PeltonError) -> bytes:
        """One error event."""
        return sse(error_body(error))

    async def whole(self, choices: Sequence[Choice], usage: Usage) -> wire.Generated:
        """The answer in one piece."""
        choice = choices[0]
        asked = self._asked
        return wire.Generated(
            generated_text=self._begin + choice.text,
            details=self._details(choice) if asked.details or asked.decoder_input_details else None,
            ignored_params=self._ignored or msgspec.UNSET,
            warnings=warnings_of(choices) or msgspec.UNSET,
        )

    def _release(self, **last: Any) -> bytes:
        """The token that was held back. An answer of none ends with an empty one, which stands for its end token."""
        token, self._held = self._held, None
        if token is None and not last:
            return b""
        self._index += 1
        shown = wire.Token(id=0, text="", logprob=0.0, special=True) if token is None else _token(token)
        count = self._asked.top_n_tokens or 0
        top = _top(token, count) if token is not None and count else msgspec.UNSET
        return sse(wire.StreamEvent(index=self._index, token=shown, top_tokens=top, **last))

    def _details(self, choice: Choice) -> wire.Details:
        count = self._asked.top_n_tokens or 0
        return wire.Details(
            finish_reason=_reason(choice.ended()),
            generated_tokens=len(choice.token_ids),
            seed=self._seed,
            prefill=self._prefill(choice.prompt) if self._asked.decoder_input_details else [],
            tokens=[_token(token) for token in choice.tokens],
            top_tokens=[_top(token, count) for token in choice.tokens] if count else msgspec.UNSET,
        )

    def _prefill(self, prompt: TextPrompt | None) -> list[wire.PrefillToken]:
        if prompt is None:
            return []
        first = wire.PrefillToken(id=self._prompt_ids[0], text=prompt.texts[0], logprob=None)
        rest = [wire.PrefillToken(id=token.id, text=token.text, logprob=token.logprob) for token in prompt.tokens]
        return [first, *rest]


def _token(token: TokenText) -> wire.Token:
    return wire.Token(id=token.id, text=token.text, logprob=token.logprob, special=False)


def _top(token: TokenText, count: int) -> list[wire.Token]:
    return [_token(each) for each in token.top[:count]]


def _reason(finish: TextFinish) -> str:
    if isinstance(finish.stop, str):
        return "stop_sequence"
    return {"stop": "eos_token"}.get(finish.reason, finish.reason)
