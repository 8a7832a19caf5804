"""What OpenAI's clients are answered, with vLLM's extra fields, and with Anthropic's where both read the same.

Source: OpenAI's API reference (chat completions, completions, embeddings, models) and vLLM's documentation.
"""

from __future__ import annotations

from datetime import datetime
from typing import Generic, TypeVar

import msgspec


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One alternative of a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a chat completion's `logprobs.content`."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """`logprobs` of a chat completion's choice."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """`logprobs` of a completion's choice: parallel lists over tokens."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class PromptLogprob(msgspec.Struct, frozen=True):
    """One token of a position of `prompt_logprobs`."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None] | msgspec.UnsetType
"""vLLM's: for each token of the prompt, it and its likeliest rivals by id; null for the first."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """`usage.completion_tokens_details`."""

    reasoning_tokens: int


class WireUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`tool_calls[].function`; in a stream, what has come of it."""

    name: str | None = None
    arguments: str


class WireCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`tool_calls[]`; in a stream, a piece of one."""

    index: int | None = None
    """Only in a stream."""
    id: str | None = None
    type: str | None = None
    function: CalledFunction


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`choices[].message`."""

    role: str = "assistant"
    content: str | None
    """Null where there are only calls."""
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[WireCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`choices[]` of a chat completion."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`choices[]` of a completion, and of each of its chunks."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`choices[].delta`."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[WireCall] | None = None


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`choices[]` of a chat completion's chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


C = TypeVar("C", bound=msgspec.Struct)
"""ChatChoice or CompletionChoice; of chunks ChunkChoice or CompletionChoice."""


class Answer(msgspec.Struct, Generic[C], frozen=True, kw_only=True):
    """A whole chat completion or completion."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    choices: list[C]
    usage: WireUsage
    prompt_logprobs: PromptLogprobs = msgspec.UNSET
    ignored_params: list[str] | msgspec.UnsetType = msgspec.UNSET
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class Chunk(msgspec.Struct, Generic[C], frozen=True, kw_only=True):
    """One chunk of a stream. `usage` stands (null but in the last) only where it was asked for."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    choices: list[C]
    usage: WireUsage | msgspec.UnsetType | None = msgspec.UNSET
    ignored_params: list[str] | msgspec.UnsetType = msgspec.UNSET
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET
    """In a choice's last chunk."""


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `data` of an embedding's answer."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str
    """In base64: float32, little-endian."""


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` of an embedding's answer."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /v1/embeddings."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    ignored_params: list[str] | msgspec.UnsetType = msgspec.UNSET
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of GET /v1/models. `max_model_len` is vLLM's, `weight_bytes` Pelton's: those in memory."""

    id: str
    created: int
    max_model_len: int | None = None
    weight_bytes: int | None = None
    object: str = "model"
    owned_by: str = "pelton"
    # as Anthropic's clients read it
    type: str = "model"
    display_name: str
    created_at: datetime
    max_input_tokens: int | None = None
    lifecycle: str = "active"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"
    # as Anthropic's clients read it
    has_more: bool = False
    first_id: str | None
    last_id: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The inner part of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every error's body."""

    error: ErrorBody
