"""Anthropic's wire types, as far as Pelton speaks them.

Source: Anthropic's API reference (Messages, Count tokens, Errors) and the types of its Python client. A field that
changes what is asked for and that Pelton does not offer stands in `NOT_OFFERED` with the values that mean nothing: any
other value is refused, never ignored.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# what is asked


class CacheControl(msgspec.Struct, frozen=True, kw_only=True):
    """`cache_control`: the prompt up to here is to be kept."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Block(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One entry of a list of `content` or of `system`."""

    cache_control: CacheControl | None = None


class TextBlock(Block, frozen=True, kw_only=True, tag="text"):
    """Text."""

    text: str


class ImageBlock(Block, frozen=True, kw_only=True, tag="image"):
    """Not offered: models read text only."""

    source: Any = None


class DocumentBlock(Block, frozen=True, kw_only=True, tag="document"):
    """Not offered, but for plain text."""

    source: Any = None
    title: str | None = None
    context: str | None = None


class ThinkingBlock(Block, frozen=True, kw_only=True, tag="thinking"):
    """What the model has thought, as an answer had it."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Block, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Thoughts that only the server which wrote them can read."""

    data: str


class ToolUseBlock(Block, frozen=True, kw_only=True, tag="tool_use"):
    """A call of a tool, as an answer had it."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block, frozen=True, kw_only=True, tag="tool_result"):
    """What a tool gave."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


ContentBlock = (
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
)


class MessageParam(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolParam(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `tools`. Only tools with a schema of their own are offered, whose type is `custom` or missing."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """Arguments are always streamed as they come."""
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """`thinking`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None
    """summarized: as it was thought. omitted: only a signature, which carries the thoughts to the next request."""


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """`metadata`."""

    user_id: str | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens: all that a prompt is made of."""

    model: str
    messages: list[MessageParam]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """As betas called `output_config.format`."""
    cache_control: CacheControl | None = None
    """Keep the prompt up to its last block."""


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """Both mean the one tier that there is."""
    thread: Any = None
    """Not offered: a chat that the server holds. The client sends all of it where it is told so."""
    # ours
    seed: int | None = None
    priority: int | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    cache_salt: str | None = None


_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "mcp_servers": _NOTHING,
    "container": _NOTHING,
    "speed": (*_NOTHING, "standard"),
}
"""Known fields that Pelton does not offer, with their values that ask for nothing."""


# what is answered


class CacheCreation(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.cache_creation`: the same tokens by how long they are kept."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """`usage.output_tokens_details`."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`usage`. The prompt's tokens are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: str = "standard"


class Text(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A block of text of an answer."""

    text: str
    citations: None = None


class Thought(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """A block of thoughts of an answer."""

    thinking: str
    signature: str


class ToolUse(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A block of an answer that calls a tool."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = Text | Thought | ToolUse


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole message; in a stream's first event, one without content."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    ignored_params: list[str] | msgspec.UnsetType = msgspec.UNSET
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class MessageStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_start"):
    """A stream's first event."""

    message: MessageAnswer


class BlockStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: AnswerBlock


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More thoughts."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="signature_delta"):
    """The thoughts' signature, behind the last of them."""

    signature: str


class InputDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of the JSON text of a tool's input."""

    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_stop"):
    """A block has ended."""

    index: int


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """`delta` of a message's end."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_delta"):
    """How the message has ended, and what it took."""

    delta: Stop
    usage: MessageUsage
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class MessageStop(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_stop"):
    """A stream's last event."""


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="ping"):
    """A sign of life."""


class MessagesErrorDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`error.details`. `param` is Pelton's own: the field that is wrong."""

    error_code: str | None = None
    param: str | None = None


class MessagesErrorBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The inner part of an error."""

    type: str
    message: str
    details: MessagesErrorDetails | None = None


class MessagesError(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """Every error's body, and a stream's last event where it fails."""

    error: MessagesErrorBody
    request_id: str


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int
