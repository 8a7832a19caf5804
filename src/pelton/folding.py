"""A stream of text events -> whole choices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from pelton.errors import InternalError
from pelton.request import (
    ChoiceEvent,
    TextDelta,
    TextDone,
    TextEmbedding,
    TextEvent,
    TextFinish,
    TextPrompt,
    TokenText,
    ToolCall,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    Usage,
)

T = TypeVar("T")


@dataclass
class Part:
    """A stretch of an answer in one kind: text, thoughts, or the arguments of a call."""

    kind: Literal["content", "reasoning"] | ToolCallBegin
    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    """Those of the text, where their logprobs were asked for; none of a call."""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


@dataclass
class Choice:
    """All of one choice."""

    prompt: TextPrompt | None = None
    parts: list[Part] = field(default_factory=list)
    """In the order in which they came; none is empty but the arguments of a call that was cut."""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    vector: bytes = b""
    """Where the answer is one and no text: float32, little-endian."""
    finish: TextFinish | None = None
    _unplaced: list[TokenText] = field(default_factory=list)
    """Tokens since the last piece of text: those of a piece that is held back, or of a call."""
    began_at: float | None = None
    """When its first event came, by `time.perf_counter`."""
    ended_at: float = 0.0

    def add(self, event: ChoiceEvent) -> None:
        """The choice's next event."""
        if self.began_at is None:
            self.began_at = time.perf_counter()
        match event:
            case TextDelta():
                self._unplaced += event.tokens
                if event.text:
                    if not self.parts or self.parts[-1].kind != event.kind:
                        self.parts.append(Part(event.kind))
                    self.parts[-1].pieces.append(event.text)
                    self._place()
                self.token_ids += event.token_ids
                self.tokens += event.tokens
            case ToolCallBegin():
                self._unplaced.clear()
                self.parts.append(Part(event))
            case ToolCallEnd():
                self._unplaced.clear()
            case ToolCallDelta():
                self.parts[-1].pieces.append(event.arguments)
            case TextEmbedding():
                self.vector = event.vector
            case TextFinish():
                if self.parts and self.parts[-1].kind == "content":
                    self._place()
                self.finish = event
                self.ended_at = time.perf_counter()

    def _place(self) -> None:
        self.parts[-1].tokens += self._unplaced
        self._unplaced.clear()

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(part.text for part in self.parts if part.kind == "content")

    @property
    def reasoning(self) -> str:
        """What was thought before it."""
        return "".join(part.text for part in self.parts if part.kind == "reasoning")

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls, in their order."""
        return tuple(
            ToolCall(id=part.kind.id, name=part.kind.name, arguments=part.text)
            for part in self.parts
            if isinstance(part.kind, ToolCallBegin)
        )

    def ended(self) -> TextFinish:
        """How it has ended."""
        if self.finish is None:
            raise InternalError("a choice ended without a finish")
        return self.finish


class Embedded(NamedTuple):
    """All of an embedding's answer."""

    vector: bytes
    """float32, little-endian."""
    usage: Usage
    warnings: tuple[str, ...]


async def embedded_of(events: AsyncIterator[TextEvent]) -> Embedded:
    """The answer of a request for an embedding."""
    choice, usage = Choice(), Usage()
    async for event in events:
        match event:
            case TextDone():
                usage = event.usage
            case TextPrompt():
                pass
            case _:
                choice.add(event)
    return Embedded(choice.vector, usage, choice.ended().warnings)


def warnings_of(choices: Sequence[Choice]) -> list[str]:
    """Those of all choices, each once."""
    return list(dict.fromkeys(each for choice in choices for each in choice.ended().warnings))


def summed(a: Usage, b: Usage) -> Usage:
    """The usage of two requests together."""
    return Usage(
        prompt_tokens=a.prompt_tokens + b.prompt_tokens,
        completion_tokens=a.completion_tokens + b.completion_tokens,
        cached_tokens=a.cached_tokens + b.cached_tokens,
        reasoning_tokens=a.reasoning_tokens + b.reasoning_tokens,
    )


async def all_of(answers: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all give, side by side. The first failure ends the others, and is raised when they have ended."""
    tasks = [asyncio.create_task(answer) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
