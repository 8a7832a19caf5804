"""The wire types of llama.cpp's server, as far as Pelton speaks them.

Source: the README of llama.cpp's server and what it answers. Defaults are those of that server. A field that changes
the answer and that Pelton does not offer stands in `NOT_OFFERED` with the values that mean nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pelton.request import Pooling
from pelton.server.openai_types import WireMessage, WireTool

Bias = dict[str, float | bool] | list[tuple[int | str, float | bool]]


DEFAULTS: dict[str, Any] = {
    "n_predict": -1,
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ("\n", ":", '"', "*"),
    "seed": -1,
    "ignore_eos": False,
}
"""Of a completion: llama.cpp's."""


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /completion. What `DEFAULTS` names and is not given may come with the model's name."""

    model: str | None = None
    prompt: str | list[str | int | list[str | int]] = ""
    """A text, ids, both mixed, or a list of such prompts."""
    n_predict: int | None = None
    """Less than 0: until the context is full. 0: nothing is said, the prompt is computed and cached."""
    n_cmpl: int = 1
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: tuple[str, ...] | None = None
    seed: int | None = None
    """Less than 0, or 4294967295: one is drawn."""
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: Bias | None = None
    n_probs: int = 0
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    return_tokens: bool = False
    timings_per_token: bool = False
    cache_prompt: bool = True
    """Changes nothing: what comes from the cache has the bits that computing it would have given."""
    id_slot: int = -1
    """Changes nothing: there are no fixed slots."""
    # ours
    priority: int | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    cache_salt: str | None = None


class InfillFile(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `input_extra`."""

    text: str
    filename: str = "tmp"


class InfillRequest(CompletionRequest, frozen=True, kw_only=True):
    """The body of POST /infill. `prompt`: what the middle begins with."""

    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] = []


_NOTHING: tuple[Any, ...] = (None, False, [], {}, "", 0)
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "dynatemp_range": _NOTHING,
    "min_keep": _NOTHING,
    "n_indent": _NOTHING,
    "t_max_predict_ms": (*_NOTHING, -1),
    "lora": _NOTHING,
    "image_data": _NOTHING,
    "post_sampling_probs": _NOTHING,
    "response_fields": _NOTHING,
    "return_progress": _NOTHING,
}
"""Known fields that Pelton does not offer, with their values that ask for nothing."""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /tokenize."""

    content: str
    model: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A token: its text, or its bytes where they are no text by themselves."""

    id: int
    piece: str | list[int]


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What all answers may have."""

    ignored_params: list[str] | msgspec.UnsetType = msgspec.UNSET


class Tokens(Listing, frozen=True, kw_only=True):
    """The answer of POST /tokenize."""

    tokens: list[int | Piece]


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class Content(Listing, frozen=True, kw_only=True):
    """The answer of POST /detokenize."""

    content: str


class TemplateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /apply-template."""

    messages: list[WireMessage]
    model: str | None = None
    tools: list[WireTool] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class Rendered(Listing, frozen=True, kw_only=True):
    """The answer of POST /apply-template."""

    prompt: str


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /embedding and /embeddings. `content` is what `input` was once called."""

    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    """A text, texts, the ids of one text, or those of several."""
    content: str | list[str | int | list[int]] | None = None
    embd_normalize: int = 2
    """-1: the vector as it is; 2: of Euclidean length 1. Others are not offered."""
    # ours
    pooling: Pooling | None = None
    priority: int | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    cache_salt: str | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the answer of POST /embedding: a list of one vector, as all of a text's are pooled."""

    index: int
    embedding: list[list[float]]
    ignored_params: list[str] | msgspec.UnsetType = msgspec.UNSET


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """`timings`. Prompt: those tokens that did not come from the cache, until the answer began; its wait is part."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Prob(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `completion_probabilities`, and of its `top_logprobs`."""

    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[Prob] | msgspec.UnsetType = msgspec.UNSET


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a stream."""

    index: int
    content: str
    tokens: list[int]
    stop: bool = False
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[Prob] | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class Completion(Listing, frozen=True, kw_only=True):
    """A whole answer; the last piece of a stream."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: bool = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: str
    stopping_word: str
    timings: Timings
    completion_probabilities: list[Prob] | msgspec.UnsetType = msgspec.UNSET
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of GET /slots: a place for a sequence."""

    id: int
    id_task: int = -1
    n_ctx: int
    speculative: bool = False
    is_processing: bool


class Props(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /props."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    """The file's name."""
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool
    """Is it not loaded? Then there are no slots, and the context is what it was trained for."""


class LlamaErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The inner part of an error."""

    code: int
    message: str
    type: str
    param: str | msgspec.UnsetType = msgspec.UNSET


class LlamaError(msgspec.Struct, frozen=True, kw_only=True):
    """Every error's body."""

    error: LlamaErrorBody
