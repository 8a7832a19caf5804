"""A stream of text events -> whole choices."""

from __future__ import annotations

from dataclasses import dataclass, field

from pelton.request import (
    ChoiceEvent,
    TextDelta,
    TextFinish,
    TextPrompt,
    TokenText,
    ToolCall,
    ToolCallBegin,
    ToolCallDelta,
    Usage,
)


@dataclass
class Choice:
    """All of one choice."""

    prompt: TextPrompt | None = None
    content: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    finish: TextFinish | None = None
    _calls: list[tuple[ToolCallBegin, list[str]]] = field(default_factory=list)

    def add(self, event: ChoiceEvent) -> None:
        """The choice's next event."""
        match event:
            case TextDelta():
                (self.thoughts if event.kind == "reasoning" else self.content).append(event.text)
                self.token_ids += event.token_ids
                self.tokens += event.tokens
            case ToolCallBegin():
                self._calls.append((event, []))
            case ToolCallDelta():
                self._calls[event.index][1].append(event.arguments)
            case TextFinish():
                self.finish = event

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(self.content)

    @property
    def reasoning(self) -> str:
        """What was thought before it."""
        return "".join(self.thoughts)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls, in their order."""
        return tuple(ToolCall(id=begin.id, name=begin.name, arguments="".join(pieces)) for begin, pieces in self._calls)


def summed(a: Usage, b: Usage) -> Usage:
    """The usage of two requests together."""
    return Usage(
        prompt_tokens=a.prompt_tokens + b.prompt_tokens,
        completion_tokens=a.completion_tokens + b.completion_tokens,
        cached_tokens=a.cached_tokens + b.cached_tokens,
        reasoning_tokens=a.reasoning_tokens + b.reasoning_tokens,
    )
