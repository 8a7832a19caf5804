"""Ollama's wire types, as far as Pelton speaks them.

Source: Ollama's document of its API and the types of its Python client. Durations are nanoseconds.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

API_VERSION = "0.12.11"
"""The release of Ollama whose API this is: clients ask for it to know what they may use."""

# what is asked


class OllamaFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `tools`."""

    function: OllamaFunction
    type: str = "function"


class OllamaCalled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function by its name, with its arguments."""

    name: str
    arguments: dict[str, Any]
    index: int | None = None
    """Of the call in its message."""
    description: str | None = None


class OllamaCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a message's `tool_calls`."""

    function: OllamaCalled
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `messages`."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    """Whose result a message of role `tool` is."""
    tool_call_id: str | None = None


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What both ways to ask have."""

    model: str
    stream: bool | None = None
    """None: true."""
    format: str | dict[str, Any] | None = None
    """"json", or a JSON schema."""
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    shift: bool | None = None
    # ours
    priority: int | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    cache_salt: str | None = None


class OllamaGenerateRequest(Common, frozen=True, kw_only=True):
    """The body of POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    images: list[Any] | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None


class OllamaChatRequest(Common, frozen=True, kw_only=True):
    """The body of POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None


class EmbeddingCommon(msgspec.Struct, frozen=True, kw_only=True):
    """What both ways to ask for embeddings have."""

    model: str
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None
    # ours
    priority: int | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    cache_salt: str | None = None


class OllamaEmbedRequest(EmbeddingCommon, frozen=True, kw_only=True):
    """The body of POST /api/embed."""

    input: str | list[str] = ""
    truncate: bool | None = None
    """None: true."""
    dimensions: int | None = None


class OllamaEmbeddingsRequest(EmbeddingCommon, frozen=True, kw_only=True):
    """The body of POST /api/embeddings."""

    prompt: str | None = None


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """A model by its name; `name` is how it was once called."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    """None: true, where the answer may be a stream."""
    insecure: bool | None = None
    verbose: bool | None = None


class OllamaCopyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /api/copy."""

    source: str
    destination: str


class OllamaPresetMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `messages` of a model that is made."""

    role: Literal["system", "user", "assistant"]
    content: str


class OllamaCreateRequest(msgspec.Struct, frozen=True, kw_only=True, rename={"base": "from"}):
    """The body of POST /api/create."""

    model: str
    base: str | None = None
    files: dict[str, str] | None = None
    """Digests of files that were sent, by their names."""
    adapters: dict[str, str] | None = None
    template: str | None = None
    license: str | list[str] | None = None
    system: str | None = None
    parameters: dict[str, Any] | None = None
    messages: list[OllamaPresetMessage] | None = None
    quantize: str | None = None
    modelfile: str | None = None
    """As it was once asked for."""
    stream: bool | None = None


# what is answered


class OllamaLikely(msgspec.Struct, frozen=True, kw_only=True):
    """A token with the logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaLikely, frozen=True, kw_only=True):
    """A token of the answer, with those that were likeliest there."""

    top_logprobs: list[OllamaLikely]


class Piece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What both ways to answer have; all behind `logprobs` is told at the end alone."""

    model: str
    created_at: str
    done: bool
    logprobs: list[OllamaLogprob] | None = None
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    ignored_params: list[str] | None = None
    warnings: list[str] | None = None


class OllamaGeneration(Piece, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of POST /api/generate, or a line of it."""

    response: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    context: list[int] | None = None


class OllamaAnswerMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`message` of an answer."""

    role: str
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaChatAnswer(Piece, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of POST /api/chat, or a line of it."""

    message: OllamaAnswerMessage


class OllamaEmbeddings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    ignored_params: list[str] | None = None
    warnings: list[str] | None = None


class OllamaEmbedding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of POST /api/embeddings."""

    embedding: list[float]
    ignored_params: list[str] | None = None
    warnings: list[str] | None = None


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is, in short."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model of GET /api/tags."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /api/tags."""

    models: list[OllamaModel]


class OllamaRunning(msgspec.Struct, frozen=True, kw_only=True):
    """One model of GET /api/ps. `size`: bytes of memory that it has."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaProcesses(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /api/ps."""

    models: list[OllamaRunning]


class OllamaShow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of POST /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    system: str | None = None
    license: str | None = None
    messages: list[OllamaPresetMessage] | None = None


class OllamaStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far something has come: a line of a stream, or all of the answer."""

    status: str
    digest: str | None = None
    total: int | None = None
    completed: int | None = None
    ignored_params: list[str] | None = None


class OllamaVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /api/version."""

    version: str
    pelton: str


class OllamaError(msgspec.Struct, frozen=True, kw_only=True):
    """Every error's body, and a stream's last line where it fails."""

    error: str
