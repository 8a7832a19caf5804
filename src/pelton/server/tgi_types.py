"""The wire types of Hugging Face's text-generation-inference, as far as Pelton speaks them.

Source: that server's own description (docs/openapi.json). A field that changes the answer and that Pelton does not
offer stands in `NOT_OFFERED` with the values that mean nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec


class GrammarField(msgspec.Struct, frozen=True, kw_only=True):
    """`parameters.grammar`."""

    type: Literal["json", "regex"]
    value: Any


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """`parameters`. Without `do_sample` or a field that is about sampling, the likeliest token is taken."""

    do_sample: bool = False
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """100, unless the model's name brings another along."""
    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    return_full_text: bool | None = None
    truncate: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The prompt's last so many tokens are used."""
    details: bool = False
    decoder_input_details: bool = False
    top_n_tokens: int | None = None
    grammar: GrammarField | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /generate and /generate_stream."""

    inputs: str
    parameters: Parameters = Parameters()
    model: str | None = None
    """Pelton's: where there are several."""


_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
NOT_OFFERED: dict[str, tuple[Any, ...]] = {"parameters.watermark": _NOTHING, "parameters.adapter_id": _NOTHING}


class PrefillToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token of the prompt; the first has no logprob."""

    id: int
    text: str
    logprob: float | None


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A token of the answer."""

    id: int
    text: str
    logprob: float
    special: bool


class StreamDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`details` of a stream's last event."""

    finish_reason: str
    generated_tokens: int
    input_length: int
    seed: int | None


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a stream; the last one has the whole text."""

    index: int
    token: Token
    generated_text: str | None = None
    details: StreamDetails | None = None
    top_tokens: list[Token] | msgspec.UnsetType = msgspec.UNSET
    ignored_params: list[str] | msgspec.UnsetType = msgspec.UNSET
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """`details` of a whole answer."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    generated_text: str
    details: Details | None = None
    ignored_params: list[str] | msgspec.UnsetType = msgspec.UNSET
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /info."""

    model_id: str
    model_sha: str | None
    """The numerics fingerprint."""
    model_pipeline_tag: str = "text-generation"
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int = 1
    max_client_batch_size: int = 1
    router: str = "pelton"
    version: str


class TGIError(msgspec.Struct, frozen=True, kw_only=True):
    """Every error's body."""

    error: str
    error_type: str
