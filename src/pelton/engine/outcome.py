"""What was sampled in a row -> what the client is told of it."""

from __future__ import annotations

from pelton.backends.base import NO_TOKEN, Sampled
from pelton.engine.sequence import Sequence
from pelton.errors import InternalError, InvalidRequest, PeltonError
from pelton.request import ErrorEvent, Logprob, PromptEvent, TokenEvent


def token_event(sequence: Sequence, token: int, sampled: Sampled, row: int) -> TokenEvent:
    """A token of an answer."""
    id, wanted = sequence.group.request.id, sequence.group.num_logprobs
    if wanted is None:
        return TokenEvent(id, sequence.choice, token)
    return TokenEvent(id, sequence.choice, token, float(sampled.logprobs[row]), likeliest(sampled, row, wanted))


def prompt_event(sequence: Sequence, token: int, sampled: Sampled, row: int) -> PromptEvent:
    """A token of the prompt, scored."""
    request = sequence.group.request
    top = likeliest(sampled, row, request.sampling.prompt_logprobs)
    return PromptEvent(request.id, token, float(sampled.logprobs[row]), int(sampled.ranks[row]), top)


def likeliest(sampled: Sampled, row: int, wanted: int | None) -> tuple[Logprob, ...]:
    """The `wanted` likeliest tokens of a row, the best first; None: all that were asked for."""
    ids, logprobs = sampled.top_ids[row, :wanted].tolist(), sampled.top_logprobs[row, :wanted].tolist()
    return tuple(map(Logprob, ids, logprobs))


def error_event(request_id: str, error: PeltonError) -> ErrorEvent:
    """The end of a request that `error` ends."""
    return ErrorEvent(request_id, type(error).__name__, error.message, error.param, error.retry_after)


def draw_error(code: int) -> PeltonError:
    """Why no token could be drawn, by the backend's code."""
    if code == NO_TOKEN:
        return InvalidRequest(
            "logit_bias, allowed_token_ids, bad_words and the constraints together allow no token", param="logit_bias"
        )
    return InternalError("the model's output for this input is not a number")
