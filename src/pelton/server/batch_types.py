"""OpenAI's wire types of batches. Source: OpenAI's API reference and its guide to batches."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pelton.server.file_types import ExpiresAfter

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
WINDOW_SECONDS = 24 * 3600
"""The completion window, of which there is one."""


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: Annotated[str, msgspec.Meta(max_length=100)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with an input file, at one line of it or as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """From 1."""


class LineErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch has failed."""

    data: list[LineError]
    object: str = "list"


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of the input tokens, those from the prefix cache."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of the output tokens, those that were thoughts."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What the completed requests have used."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    model: str | None = None
    errors: LineErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None
    object: str = "batch"


class BatchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of GET /v1/batches."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    after: Annotated[str, msgspec.Meta(max_length=100)] | None = None


class InputLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an input file."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw
    """The request's JSON as it was written."""


class LineBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked at of a request before it runs."""

    model: str
    stream: bool | None = None
    background: bool | None = None


class LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    """How a request was answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request did not run."""

    code: str
    message: str


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an output or error file. `response` is null where the request did not run, and `error` where it did."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: Failure | None


class AnswerUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of an answer, under the names of any of the endpoints."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: InputDetails | None = None
    completion_tokens_details: OutputDetails | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: InputDetails | None = None
    output_tokens_details: OutputDetails | None = None


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked at of an answer."""

    usage: AnswerUsage | None = None


def plus(usage: BatchUsage, body: bytes | msgspec.Raw) -> BatchUsage:
    """With what one more answer has used."""
    more = msgspec.json.decode(body, type=Answered).usage
    if more is None:
        return usage
    inside, outside = (
        more.input_tokens_details or more.prompt_tokens_details or InputDetails(),
        more.output_tokens_details or more.completion_tokens_details or OutputDetails(),
    )
    num_in = more.input_tokens or more.prompt_tokens
    num_out = more.output_tokens or more.completion_tokens
    return BatchUsage(
        input_tokens=usage.input_tokens + num_in,
        input_tokens_details=InputDetails(
            cached_tokens=usage.input_tokens_details.cached_tokens + inside.cached_tokens
        ),
        output_tokens=usage.output_tokens + num_out,
        output_tokens_details=OutputDetails(
            reasoning_tokens=usage.output_tokens_details.reasoning_tokens + outside.reasoning_tokens
        ),
        total_tokens=usage.total_tokens + num_in + num_out,
    )
