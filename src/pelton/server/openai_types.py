"""What OpenAI's clients ask, as far as Pelton speaks it, with vLLM's extra fields; `openai_reply_types` has answers.

Source: OpenAI's API reference (chat completions, completions, embeddings) and vLLM's documentation of its extra
parameters. A field that Pelton knows but does not offer yet stands in `NOT_OFFERED` with the values that mean
nothing: any other value is refused, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from pelton.request import Pooling, ProcessorCall

Stop = str | list[str] | None
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's; not offered."""


class JSONSchema(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format.json_schema`. Unless `strict` is false, a schema that cannot be enforced is refused."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format`. `schema` beside the type is how llama.cpp and others spell it; structural tags are as vLLM has
    them."""

    type: Literal["text", "json_object", "json_schema", "structural_tag", "grammar", "regex"]
    json_schema: JSONSchema | None = None
    schema: dict[str, Any] | bool | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    grammar: str | None = None
    pattern: str | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """`structured_outputs`, vLLM's: one of these."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What all operations that make text share."""

    model: str
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Stop = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    # llama.cpp's
    grammar: str | None = None
    # vLLM's
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # Pelton's; vLLM's has other items
    logits_processors: list[str | ProcessorCall] | None = None
    # llama.cpp's, and what front ends of it call them
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat_mode: Literal[0, 2] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    priority: int | None = None
    # as LiteLLM names it; seconds
    timeout: float | None = None
    # ours
    queue_timeout: float | None = None


class ChoiceFields(SamplingFields, frozen=True, kw_only=True):
    """What chat completions and completions share."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    # vLLM's
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: int | None = None


class WireMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `messages`."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # not offered
    function_call: Any = None
    audio: Any = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """`tools[].function`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class WireTool(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(msgspec.Struct, frozen=True):
    """A function by its name."""

    name: str


class AllowedTool(msgspec.Struct, frozen=True):
    """One entry of `tool_choice.allowed_tools.tools`."""

    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct, frozen=True):
    """`tool_choice.allowed_tools`."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class WireToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice` as an object: one function, or those that may be called."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ChatRequest(ChoiceFields, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[WireMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: list[WireTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | WireToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    service_tier: ServiceTier | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # ours
    reasoning_budget: int | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(ChoiceFields, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    """A text, texts, the ids of one text, or those of several."""
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/embeddings."""

    model: str
    input: str | list[str | int | list[int]]
    """A text, texts, the ids of one text, or those of several."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    # vLLM's
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    """Where it is cut; None: left."""
    normalize: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    # ours
    pooling: Pooling | None = None
    queue_timeout: float | None = None


_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "functions": _NOTHING,
    "function_call": (*_NOTHING, "none", "auto"),
    "modalities": (*_NOTHING, ["text"]),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "web_search_options": _NOTHING,
    "prompt_embeds": _NOTHING,
    "truncate_prompt_tokens": _NOTHING,
    "chat_template": _NOTHING,
    "documents": _NOTHING,
}
"""Known fields that Pelton does not offer, with their values that ask for nothing."""
