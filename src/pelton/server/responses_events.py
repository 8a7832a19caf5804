"""The events of a stream of /v1/responses. Source: OpenAI's API reference (streaming events)."""

from __future__ import annotations

import msgspec

from pelton.server.openai_reply_types import TokenLogprob
from pelton.server.responses_types import OutputItem, OutputText, ReasoningText, Response


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    """What all have: their place in the stream, from 0."""

    sequence_number: int = 0


class WholeEvent(Event, kw_only=True):
    """About the response, as it is then."""

    response: Response


class Created(WholeEvent, kw_only=True, tag="response.created"):
    """The first event."""


class Queued(WholeEvent, kw_only=True, tag="response.queued"):
    """A background response waits for its model or its turn."""


class InProgress(WholeEvent, kw_only=True, tag="response.in_progress"):
    """The model has begun."""


class Completed(WholeEvent, kw_only=True, tag="response.completed"):
    """The last event of a response that went well."""


class Incomplete(WholeEvent, kw_only=True, tag="response.incomplete"):
    """The last event of a response that was cut."""


class Failed(WholeEvent, kw_only=True, tag="response.failed"):
    """The last event of a response that failed, or was cancelled."""


class Error(Event, kw_only=True, tag="error"):
    """What went wrong, before `response.failed`."""

    code: str | None
    message: str
    param: str | None


class ItemEvent(Event, kw_only=True):
    """About an item of the output."""

    output_index: int


class ItemAdded(ItemEvent, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    item: OutputItem


class ItemDone(ItemEvent, kw_only=True, tag="response.output_item.done"):
    """An item has ended."""

    item: OutputItem


class PartEvent(ItemEvent, kw_only=True):
    """About a part of an item's content. Items have one here."""

    item_id: str
    content_index: int = 0


class PartAdded(PartEvent, kw_only=True, tag="response.content_part.added"):
    """A part begins."""

    part: OutputText | ReasoningText


class PartDone(PartEvent, kw_only=True, tag="response.content_part.done"):
    """A part has ended."""

    part: OutputText | ReasoningText


class TextDelta(PartEvent, kw_only=True, tag="response.output_text.delta"):
    """A piece of text."""

    delta: str
    logprobs: list[TokenLogprob]


class TextDone(PartEvent, kw_only=True, tag="response.output_text.done"):
    """All of a text."""

    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(PartEvent, kw_only=True, tag="response.reasoning_text.delta"):
    """A piece of thoughts."""

    delta: str


class ReasoningDone(PartEvent, kw_only=True, tag="response.reasoning_text.done"):
    """All thoughts of an item."""

    text: str


class ArgumentsDelta(ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    """A piece of a call's arguments."""

    item_id: str
    delta: str


class ArgumentsDone(ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    """All arguments of a call."""

    item_id: str
    name: str
    arguments: str
