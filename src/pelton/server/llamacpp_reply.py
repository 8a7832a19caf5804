"""How llama.cpp's completions are written: whole, and as a stream; and errors in that server's form."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pelton.errors import ContextLengthExceeded, InternalError, PeltonError
from pelton.folding import Choice, warnings_of
from pelton.request import Request, TextDelta, TextFinish, TextPrompt, TokenText, Usage
from pelton.server import llamacpp_types as wire
from pelton.server.answer import ToolCallEvent, ignored_params
from pelton.server.wire import KEEP_ALIVE, sse

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
"""By status; the others under 500 are invalid_request_error, and from there on server_error."""


def error_body(error: PeltonError) -> wire.LlamaError:
    """An error as clients of llama.cpp expect it."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    if isinstance(error, ContextLengthExceeded):
        kind = "exceed_context_size_error"
    body = wire.LlamaErrorBody(code=error.status, message=error.message, type=kind, param=error.param or msgspec.UNSET)
    return wire.LlamaError(error=body)


class LlamaReply:
    """Writes the completions of one or several prompts; several are a list."""

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        body: wire.CompletionRequest,
        extras: dict[str, Any],
        requests: Sequence[Request],
        prompts: Sequence[str],
        settings: dict[str, Any],
    ) -> None:
        """`prompts`: their texts. `settings`: what the requests come to."""
        self.is_stream = body.stream
        self.num_choices = body.n_cmpl
        self.fingerprint: str | None = None
        self._body = body
        self._model = requests[0].model
        self._ignored = ignored_params(extras, wire.NOT_OFFERED)
        self._lengths = [len(request.prompt_ids or ()) for request in requests]
        self._prompts = prompts
        self._settings = settings
        self._began = time.perf_counter()
        self._choices = [Choice() for _ in range(len(requests) * body.n_cmpl)]
        """What has been streamed."""

    def opening(self, index: int) -> bytes:
        """Nothing."""
        return b""

    def prompt(self, index: int, prompt: TextPrompt) -> bytes:
        """Nothing: it is told at the end."""
        return b""

    def delta(self, index: int, delta: TextDelta) -> bytes:
        """A piece of text with its tokens."""
        choice = self._choices[index]
        choice.add(delta)
        if not delta.text and not delta.token_ids:
            return b""
        chunk = wire.Chunk(
            index=index,
            content=delta.text,
            tokens=list(delta.token_ids),
            tokens_predicted=len(choice.token_ids),
            tokens_evaluated=self._num_prompt(index),
            completion_probabilities=self._probs(delta.tokens),
            timings=self._timings(index, choice, 0) if self._body.timings_per_token else msgspec.UNSET,
        )
        return sse(chunk)

    def tool_call(self, index: int, event: ToolCallEvent) -> bytes:
        """Never: a completion calls nothing."""
        raise InternalError("a completion has called a tool")

    def finish(self, index: int, finish: TextFinish) -> bytes:
        """Nothing: the last pieces come when all is counted."""
        self._choices[index].add(finish)
        return b""

    async def ending(self, usage: Usage) -> bytes:
        """Each choice's last piece. It has no text: that was streamed."""
        last = (self._completion(i, choice, usage) for i, choice in enumerate(self._choices))
        return b"".join(
            sse(msgspec.structs.replace(each, content="", tokens=[], completion_probabilities=msgspec.UNSET))
            for each in last
        )

    async def failure(self, error: PeltonError) -> bytes:
        """One error event."""
        return sse(error_body(error))

    async def whole(self, choices: Sequence[Choice], usage: Usage) -> Any:
        """One answer, or a list of them."""
        answers = [self._completion(i, choice, usage) for i, choice in enumerate(choices)]
        return answers if len(answers) > 1 else answers[0]

    def _completion(self, index: int, choice: Choice, usage: Usage) -> wire.Completion:
        finish = choice.ended()
        cached = usage.cached_tokens if len(self._prompts) == 1 else 0
        limit = self._settings["n_predict"]
        return wire.Completion(
            index=index,
            content=choice.text,
            tokens=list(choice.token_ids) if self._body.return_tokens else [],
            model=self._model,
            tokens_predicted=len(choice.token_ids),
            tokens_evaluated=self._num_prompt(index),
            tokens_cached=cached,
            generation_settings=self._settings,
            prompt=self._prompts[index // self.num_choices],
            has_new_line="\n" in choice.text,
            truncated=finish.reason == "length" and (limit < 0 or len(choice.token_ids) < limit),
            stop_type=_stop_type(finish),
            stopping_word=finish.stop if isinstance(finish.stop, str) else "",
            timings=self._timings(index, choice, cached),
            completion_probabilities=self._probs(choice.tokens),
            ignored_params=self._ignored or msgspec.UNSET,
            warnings=warnings_of([choice]) or msgspec.UNSET,
        )

    def _num_prompt(self, index: int) -> int:
        return self._lengths[index // self.num_choices]

    def _timings(self, index: int, choice: Choice, num_cached: int) -> wire.Timings:
        began = choice.began_at or time.perf_counter()
        num_prompt, num_predicted = self._num_prompt(index) - num_cached, len(choice.token_ids)
        prompt = max(began - self._began, 1e-6)
        predicted = max((choice.ended_at or time.perf_counter()) - began, 1e-6)
        return wire.Timings(
            cache_n=num_cached,
            prompt_n=num_prompt,
            prompt_ms=prompt * 1e3,
            prompt_per_token_ms=prompt * 1e3 / max(num_prompt, 1),
            prompt_per_second=num_prompt / prompt,
            predicted_n=num_predicted,
            predicted_ms=predicted * 1e3,
            predicted_per_token_ms=predicted * 1e3 / max(num_predicted, 1),
            predicted_per_second=num_predicted / predicted,
        )

    def _probs(self, tokens: Sequence[TokenText]) -> list[wire.Prob] | msgspec.UnsetType:
        if self._body.n_probs <= 0:
            return msgspec.UNSET
        return [
            msgspec.structs.replace(_prob(token), top_logprobs=[_prob(each) for each in token.top]) for token in tokens
        ]


def _prob(token: TokenText) -> wire.Prob:
    return wire.Prob(id=token.id, token=token.text, bytes=list(token.bytes), logprob=token.logprob)


def _stop_type(finish: TextFinish) -> str:
    if isinstance(finish.stop, str):
        return "word"
    return {"stop": "eos", "length": "limit"}.get(finish.reason, "none")
