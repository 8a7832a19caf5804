"""The wire types of OpenAI's /v1/responses, but for the events of its streams.

Source: OpenAI's API reference (responses). Fields of chat completions that OpenAI's do not have here (`seed`, `stop`,
`top_k`, ...) mean the same as there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from pelton.server.openai_reply_types import TokenLogprob
from pelton.server.openai_types import Effort, SamplingFields, ServiceTier

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


# what a request gives


class InputPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of an item's content. Which fields are there depends on its type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    # of what a client sends back, and of what is not offered
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None
    input_audio: Any = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `input`. Which fields are there depends on its type; without one it is a message, or a reference
    where it has nothing but an id."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    phase: str | None = None
    # calls and what they gave
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    # thoughts
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `tools`. Other types than `function` are refused."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool by its name."""

    type: str
    name: str | None = None


class NamedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice` as an object: one function, or those that may be called."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedTool] | None = None


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`text.format`. Unless `strict` is false, a schema that cannot be enforced is refused."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning`."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`."""

    include_obfuscation: bool | None = None


class CountRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of POST /v1/responses/input_tokens: what shapes a prompt."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of POST /v1/responses."""

    store: bool | None = None
    background: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tool_calls: Annotated[int, msgspec.Meta(ge=1)] | None = None
    include: list[Includable] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    service_tier: ServiceTier | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # ours
    reasoning_budget: int | None = None


_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("conversation", "prompt", "moderation", "context_management"), _NOTHING),
    # of chat completions, under other names or not here
    **dict.fromkeys(("messages", "max_tokens", "max_completion_tokens", "logprobs", "reasoning_effort"), _NOTHING),
    **dict.fromkeys(("best_of", "use_beam_search", "prompt_logprobs", "functions", "function_call"), _NOTHING),
    "n": (*_NOTHING, 1),
}
"""Known fields that are not offered here, with their values that ask for nothing."""


# items, as they are stored and shown


class InputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    """Text from the client."""

    text: str


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text from the model. `logprobs` are empty unless they were asked for."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """A refusal that a client sent back. The models here have no words of their own for it."""

    refusal: str


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message."""

    id: str
    status: ItemStatus = "completed"
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | OutputText | Refusal]


class SummaryText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    """A summary of thoughts, which other servers make."""

    text: str


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Thoughts."""

    text: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What was thought before an answer."""

    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None
    status: ItemStatus = "completed"


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call. `arguments` is the JSON text of one object, unless it was cut."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"


class FunctionCallOutput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    """What a call gave."""

    id: str
    call_id: str
    output: str | list[InputText]
    status: ItemStatus = "completed"


Item = Message | ReasoningItem | FunctionCall | FunctionCallOutput
OutputItem = Message | ReasoningItem | FunctionCall


# the answer


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.input_tokens_details`. What was not cached is written to the cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.output_tokens_details`."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`usage`."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed. `code` is one of OpenAI's, `type` and `param` are those of the error itself."""

    code: str
    message: str
    type: str
    param: str | None = None


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response: what was asked, as far as it is no prompt, and what came of it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    completed_at: int | None = None
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: str
    store: bool
    """Is it stored? Not what was asked, where it could not be."""
    temperature: float | None
    """null: as the model has it; so is `top_p`."""
    text: TextConfig
    tool_choice: ToolChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    system_fingerprint: str | None = None
    ignored_params: list[str] | msgspec.UnsetType = msgspec.UNSET
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to DELETE."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /v1/responses/input_tokens."""

    object: str = "response.input_tokens"
    input_tokens: int


# query parameters


class RetrieveQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Of GET /v1/responses/{id}."""

    stream: bool = False
    starting_after: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Only with `stream`: the events behind the one of this `sequence_number`."""


class ItemsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Of GET /v1/responses/{id}/input_items."""

    after: str | None = None
    """The id of an item: those that come after it."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
