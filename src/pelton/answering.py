"""The engine's events -> text events: one request under way."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from pelton.engine.client import error_of
from pelton.errors import InternalError
from pelton.request import (
    Accepted,
    AnswerReason,
    ChoiceEvent,
    Done,
    EngineRequest,
    ErrorEvent,
    Finish,
    PromptEvent,
    SamplingParams,
    TextDelta,
    TextDone,
    TextEvent,
    TextFinish,
    TokenEvent,
    TokenText,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    Usage,
)
from pelton.text.enforcement import Enforcement
from pelton.text.output import OutputParser
from pelton.text.prompt_logprobs import AskedPrompt, token_text
from pelton.text.stream import TextStream
from pelton.text.tools.reader import Arguments, Begin, End, Piece, Text

if TYPE_CHECKING:
    from pelton.service import Service

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """What the service knows of a request and the engine does not."""

    sampling: SamplingParams
    enforced: Enforcement
    is_one_call: bool = False
    """Does the answer end with its first call?"""
    warnings: tuple[str, ...] = ()
    """For every choice's end."""


@dataclass
class _Choice:
    """One choice under way."""

    stream: TextStream
    parser: OutputParser | None
    """None: all text is the answer."""
    num_tokens: int = 0
    """Tokens so far, the one that ended it included."""
    num_thought: int = 0
    """Those of them that the model thought with, the tags included."""
    said: list[str] = field(default_factory=list)
    """The answer's text, without thoughts."""
    calls: list[tuple[str, list[str]]] = field(default_factory=list)
    """Names, and what has come of the arguments."""
    unsent: list[int] = field(default_factory=list)
    """Tokens since the last piece."""
    logprob: float = 0.0
    """Of all tokens so far together, where the engine told it."""
    is_finished: bool = False


class Answer:
    """A request under way: the engine's events -> text events."""

    def __init__(self, service: Service, request: EngineRequest, asked: Asked, prompt: AskedPrompt) -> None:
        sampling = asked.sampling
        self._prompt = prompt
        self._engine = service.engine
        self._tokenizer = service.tokenizer
        self._find_faults = service.faults
        self._request = request
        self._asked = asked
        self._wants_logprobs = sampling.logprobs is not None
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._is_accepted = False
        self._unenforced: tuple[str, ...] = ()
        """What the engine says that it cannot enforce."""
        form = asked.enforced.form
        shown = {id for text in form.markers if (id := service.tokenizer.control_id(text)) is not None}
        self._choices = [
            _Choice(
                TextStream(
                    service.tokenizer,
                    stop=sampling.stop,
                    include_stop=sampling.include_stop_str_in_output,
                    skip_special=sampling.skip_special_tokens,
                    shown=shown,
                    min_tokens=sampling.min_tokens,
                ),
                None if form.is_plain else OutputParser(form),
            )
            for _ in range(request.sampling.n)
        ]

    def logprob(self, index: int) -> float:
        """Of all tokens of a choice together, where the engine was asked for logprobs."""
        return self._choices[index].logprob

    async def events(self) -> AsyncGenerator[TextEvent, None]:
        """First an empty piece, once the engine has accepted the request; then its events."""
        stream = self._engine.submit(self._request)
        try:
            async for event in stream:
                match event:
                    case Accepted(warnings=warnings):
                        self._is_accepted = True
                        self._take_warnings(warnings)
                        yield TextDelta(choice=0, text="")
                        for told in self._prompt.start():
                            yield told
                    case PromptEvent():
                        for told in self._prompt.take(event):
                            yield told
                    case TokenEvent():
                        for piece in await self._take(event):
                            yield piece
                    case Finish():
                        for piece in await self._end(event):
                            yield piece
                    case Done(usage=usage, queued=queued, prefill=prefill):
                        yield TextDone(usage=self._count(usage), queued=queued, prefill=prefill)
                        return
                    case ErrorEvent():
                        raise error_of(event)
            raise InternalError("the engine's events ended without a last one")
        except Exception:
            for finish in self._fail():
                yield finish
            raise
        finally:
            if (close := getattr(stream, "aclose", None)) is not None:
                await close()

    def _take_warnings(self, warnings: tuple[str, ...]) -> None:
        if (grammar := self._request.grammar) is not None:
            self._unenforced = tuple(f"{grammar.param} is not enforced in full: {each}" for each in warnings)

    async def _take(self, event: TokenEvent) -> list[ChoiceEvent]:
        choice = self._choices[event.choice]
        if choice.is_finished:  # A stop string has ended it; the engine hears of it only now.
            return []
        choice.num_tokens += 1
        choice.logprob += event.logprob or 0.0
        choice.unsent.append(event.token_id)
        tokens = (self._token_text(event),) if self._wants_logprobs else ()
        was_thinking = choice.parser is not None and choice.parser.is_thinking
        events = self._pieces(event.choice, choice.stream.feed(event.token_id), tokens)
        choice.num_thought += was_thinking or (choice.parser is not None and choice.parser.is_thinking)
        if choice.stream.stopped_by is not None:
            self._engine.abort(self._request.id, event.choice)
            events += await self._finish(event.choice, "stop", choice.stream.stopped_by)
        elif self._has_called(choice):
            self._engine.abort(self._request.id, event.choice)
            events += await self._finish(event.choice, "stop", None)
        return events

    def _has_called(self, choice: _Choice) -> bool:
        """Has it made the one call that it may make?"""
        return self._asked.is_one_call and choice.parser is not None and choice.parser.num_complete_calls > 0

    async def _end(self, event: Finish) -> list[ChoiceEvent]:
        choice = self._choices[event.choice]
        if choice.is_finished:
            return []
        choice.num_tokens += event.stop_id is not None
        choice.logprob += event.logprob or 0.0
        stop = event.stop_id if event.stop_id in self._stop_ids else None
        return await self._finish(event.choice, event.reason, stop)

    async def _finish(self, index: int, reason: AnswerReason, stop: str | int | None) -> list[ChoiceEvent]:
        choice = self._choices[index]
        events: list[ChoiceEvent] = []
        if not self._has_called(choice):  # what follows the one call is not told
            events = self._pieces(index, choice.stream.finish(), ())
        if choice.stream.stopped_by is not None:
            reason, stop = "stop", choice.stream.stopped_by
        warnings = self._asked.warnings + self._unenforced
        if choice.parser is not None:
            events += self._events(index, choice.parser.finish())
            warnings += choice.parser.warnings
            if reason == "stop" and choice.parser.num_complete_calls:
                reason = "tool_calls"
        if choice.unsent:
            events.append(self._delta(index, "", ()))
        if reason in ("stop", "tool_calls"):
            warnings += await self._faults(choice)
        choice.is_finished = True
        return [*events, TextFinish(choice=index, reason=reason, stop=stop, warnings=warnings)]

    async def _faults(self, choice: _Choice) -> tuple[str, ...]:
        """What a finished answer does not fulfil of what was asked."""
        enforced = self._asked.enforced
        if not enforced.has_schemas:
            return ()
        calls = [(name, "".join(text)) for name, text in choice.calls]
        faults = await self._find_faults(enforced, "".join(choice.said), calls)
        if faults and enforced.is_strict and not self._unenforced:
            log.error("an answer under a grammar does not fulfil its schema: request %s", self._request.id)
        return tuple(faults)

    def _fail(self) -> list[TextEvent]:
        """End the choices that are still open when an error is about to be raised."""
        failed = [i for i, choice in enumerate(self._choices) if self._is_accepted and not choice.is_finished]
        for i in failed:
            self._choices[i].is_finished = True
        return [TextFinish(choice=i, reason="error") for i in failed]

    def _pieces(self, index: int, text: str, tokens: tuple[TokenText, ...]) -> list[ChoiceEvent]:
        """The events of some text and its tokens."""
        parser = self._choices[index].parser
        if parser is None:
            return [self._delta(index, text, tokens)] if text or tokens else []
        events = self._events(index, parser.feed(text) if text else [])
        if tokens and isinstance(first := events[0] if events else None, TextDelta):
            events[0] = msgspec.structs.replace(first, tokens=tokens)
        elif tokens:
            kind: Literal["content", "reasoning"] = "reasoning" if parser.is_thinking else "content"
            events.insert(0, self._delta(index, "", tokens, kind))
        return events

    def _events(self, index: int, pieces: list[Piece]) -> list[ChoiceEvent]:
        choice = self._choices[index]
        events: list[ChoiceEvent] = []
        for piece in pieces:
            match piece:
                case Text(text, is_reasoning):
                    events.append(self._delta(index, text, (), "reasoning" if is_reasoning else "content"))
                case Begin(name):
                    assert self._asked.enforced.form.dialect is not None
                    call_id = self._asked.enforced.form.dialect.call_id()
                    events.append(ToolCallBegin(choice=index, index=len(choice.calls), id=call_id, name=name))
                    choice.calls.append((name, []))
                case Arguments(text):
                    events.append(ToolCallDelta(choice=index, index=len(choice.calls) - 1, arguments=text))
                    choice.calls[-1][1].append(text)
                case End():
                    events.append(ToolCallEnd(choice=index, index=len(choice.calls) - 1))
        return events

    def _delta(
        self,
        index: int,
        text: str,
        tokens: tuple[TokenText, ...],
        kind: Literal["content", "reasoning"] = "content",
    ) -> TextDelta:
        choice = self._choices[index]
        token_ids, choice.unsent = tuple(choice.unsent), []
        if kind == "content":
            choice.said.append(text)
        return TextDelta(choice=index, text=text, kind=kind, token_ids=token_ids, tokens=tokens)

    def _token_text(self, event: TokenEvent) -> TokenText:
        if event.logprob is None:
            raise InternalError("the engine sent a token without the logprob that was asked for")
        return token_text(self._tokenizer, event.token_id, event.logprob, event.top)

    def _count(self, usage: Usage) -> Usage:
        """What the engine counted, but without tokens that it made after a stop string was found."""
        return msgspec.structs.replace(
            usage,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            reasoning_tokens=sum(choice.num_thought for choice in self._choices),
        )
