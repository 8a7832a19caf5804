"""How OpenAI's two endpoints write their answers: whole, and as a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from pelton.errors import InternalError, InvalidRequest, PeltonError
from pelton.folding import Choice, warnings_of
from pelton.request import (
    TextDelta,
    TextFinish,
    TextPrompt,
    TokenText,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    Usage,
)
from pelton.server import openai_reply_types as replies
from pelton.server import openai_types as wire
from pelton.server.answer import ToolCallEvent, ignored_params
from pelton.server.wire import DONE, KEEP_ALIVE, sse

B = TypeVar("B", bound=wire.ChoiceFields)


def error_body(error: PeltonError) -> replies.ErrorAnswer:
    """An error as OpenAI's clients expect it."""
    return replies.ErrorAnswer(
        error=replies.ErrorBody(message=error.message, type=error.type, param=error.param, code=error.code)
    )


class OpenAIReply(Generic[B]):
    """What both endpoints share: ids, time, usage, ignored parameters, the end of a stream."""

    object_name: str
    chunk_name: str
    keep_alive = KEEP_ALIVE

    def __init__(self, id: str, body: B, extras: dict[str, Any], *, wants_logprobs: bool) -> None:
        self.id = id
        self.model = body.model
        self.num_choices = 1 if body.n is None else body.n
        self.is_stream = bool(body.stream)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        if body.stream_options is not None and body.stream_options.continuous_usage_stats:
            raise InvalidRequest("continuous_usage_stats is not supported by this server", param="stream_options")
        self.wants_usage = body.stream_options is not None and body.stream_options.include_usage
        self.wants_logprobs = wants_logprobs
        self.num_prompt_logprobs = body.prompt_logprobs
        if body.prompt_logprobs is not None and body.stream:
            raise InvalidRequest("prompt_logprobs are not part of a stream", param="prompt_logprobs")
        self.ignored = ignored_params(extras, wire.NOT_OFFERED)
        self.created = int(time.time())
        self.fingerprint: str | None = None
        self.service_tier: str | msgspec.UnsetType = msgspec.UNSET

    def chunk(self, choices: list[Any], usage: replies.WireUsage | None = None, warnings: Sequence[str] = ()) -> bytes:
        """One chunk. Where usage was asked for it stands in every chunk, null in all but the last."""
        value = replies.Chunk(
            id=self.id,
            object=self.chunk_name,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            service_tier=self.service_tier,
            choices=choices,
            usage=usage if self.wants_usage else msgspec.UNSET,
            ignored_params=self.ignored or msgspec.UNSET,
            warnings=list(warnings) or msgspec.UNSET,
        )
        return sse(value)

    async def ending(self, usage: Usage) -> bytes:
        """The usage chunk where it was asked for, and the end mark."""
        return (self.chunk([], _usage(usage)) if self.wants_usage else b"") + DONE

    async def failure(self, error: PeltonError) -> bytes:
        """One error event; no end mark follows."""
        return sse(error_body(error))

    async def whole(self, choices: Sequence[Choice], usage: Usage) -> replies.Answer[Any]:
        """The answer in one piece."""
        return replies.Answer(
            id=self.id,
            object=self.object_name,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            service_tier=self.service_tier,
            choices=[self.choice(i, choice, choice.ended()) for i, choice in enumerate(choices)],
            usage=_usage(usage),
            prompt_logprobs=self.prompt_logprobs(choices),
            ignored_params=self.ignored or msgspec.UNSET,
            warnings=warnings_of(choices) or msgspec.UNSET,
        )

    def choice(self, index: int, choice: Choice, finish: TextFinish) -> Any:
        """One choice of the answer in one piece."""
        raise NotImplementedError

    def prompt_logprobs(self, choices: Sequence[Choice]) -> replies.PromptLogprobs:
        """Those of the answer as a whole."""
        return msgspec.UNSET

    def _prompt_logprobs(self, prompt: TextPrompt | None) -> replies.PromptLogprobs:
        if self.num_prompt_logprobs is None or prompt is None:
            return msgspec.UNSET
        return [None, *(_rivals(token, self.num_prompt_logprobs) for token in prompt.tokens)]


class ChatReply(OpenAIReply[wire.ChatRequest]):
    """Writes chat completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        """The chunk that carries the role."""
        return self.chunk([replies.ChunkChoice(index=index, delta=replies.Delta(role="assistant", content=""))])

    def prompt(self, index: int, prompt: TextPrompt) -> bytes:
        """Nothing: a chat is not repeated."""
        return b""

    def prompt_logprobs(self, choices: Sequence[Choice]) -> replies.PromptLogprobs:
        """Those of the rendered chat."""
        return self._prompt_logprobs(choices[0].prompt)

    def delta(self, index: int, delta: TextDelta) -> bytes:
        """A piece of text, with its tokens' logprobs where they were asked for."""
        if not delta.text and not delta.tokens:
            return b""
        logprobs = _chat_logprobs(delta.tokens) if self.wants_logprobs else None
        is_reasoning = delta.kind == "reasoning"
        said = replies.Delta(reasoning_content=delta.text) if is_reasoning else replies.Delta(content=delta.text)
        return self.chunk([replies.ChunkChoice(index=index, delta=said, logprobs=logprobs)])

    def tool_call(self, index: int, event: ToolCallEvent) -> bytes:
        """A piece of a call: the first carries its id and name."""
        match event:
            case ToolCallBegin():
                function = replies.CalledFunction(name=event.name, arguments="")
                call = replies.WireCall(index=event.index, id=event.id, type="function", function=function)
            case ToolCallDelta():
                call = replies.WireCall(index=event.index, function=replies.CalledFunction(arguments=event.arguments))
            case ToolCallEnd():
                return b""
        return self.chunk([replies.ChunkChoice(index=index, delta=replies.Delta(tool_calls=[call]))])

    def finish(self, index: int, finish: TextFinish) -> bytes:
        """The chunk that carries the finish reason."""
        end = replies.ChunkChoice(
            index=index, delta=replies.Delta(), finish_reason=finish.reason, stop_reason=finish.stop
        )
        return self.chunk([end], warnings=finish.warnings)

    def choice(self, index: int, choice: Choice, finish: TextFinish) -> replies.ChatChoice:
        """One choice of the answer in one piece."""
        return replies.ChatChoice(
            index=index,
            message=_message(choice),
            logprobs=_chat_logprobs(choice.tokens) if self.wants_logprobs else None,
            finish_reason=finish.reason,
            stop_reason=finish.stop,
        )


class CompletionReply(OpenAIReply[wire.CompletionRequest]):
    """Writes completions."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, id: str, body: wire.CompletionRequest, extras: dict[str, Any], *, wants_logprobs: bool) -> None:
        super().__init__(id, body, extras, wants_logprobs=wants_logprobs)
        self._offsets: dict[int, int] = {}
        self._is_echo = bool(body.echo)
        self._num_logprobs = body.logprobs or 0

    def opening(self, index: int) -> bytes:
        """Nothing: a completion has no role."""
        return b""

    def prompt(self, index: int, prompt: TextPrompt) -> bytes:
        """The prompt, where it is to be repeated, with its tokens' logprobs where they were asked for."""
        columns = self._prompt_columns(index, prompt)
        choice = replies.CompletionChoice(
            index=index, text=prompt.text, logprobs=columns, finish_reason=None, stop_reason=None
        )
        return self.chunk([choice]) if self._is_echo else b""

    def delta(self, index: int, delta: TextDelta) -> bytes:
        """A piece of text, with its tokens' logprobs where they were asked for."""
        if not delta.text and not delta.tokens:
            return b""
        return self.chunk([self._choice(index, delta.text, delta.tokens, None)])

    def tool_call(self, index: int, event: ToolCallEvent) -> bytes:
        """Never: a completion calls nothing."""
        raise InternalError("a completion has called a tool")

    def finish(self, index: int, finish: TextFinish) -> bytes:
        """The chunk that carries the finish reason."""
        return self.chunk([self._choice(index, "", (), finish)], warnings=finish.warnings)

    def choice(self, index: int, choice: Choice, finish: TextFinish) -> replies.CompletionChoice:
        """One choice of the answer in one piece."""
        prompt = choice.prompt
        echoed = prompt if self._is_echo else None
        columns = None if echoed is None else self._prompt_columns(index, echoed)
        answer = self._choice(index, choice.text, choice.tokens, finish)
        if columns is not None and answer.logprobs is not None:
            for name in columns.__struct_fields__:
                getattr(columns, name).extend(getattr(answer.logprobs, name))
        return msgspec.structs.replace(
            answer,
            text=answer.text if echoed is None else echoed.text + answer.text,
            logprobs=columns or answer.logprobs,
            prompt_logprobs=self._prompt_logprobs(prompt),
        )

    def _prompt_columns(self, index: int, prompt: TextPrompt) -> replies.CompletionLogprobs | None:
        if not self.wants_logprobs:
            return None
        columns = replies.CompletionLogprobs(
            tokens=[prompt.texts[0]], token_logprobs=[None], top_logprobs=[None], text_offset=[0]
        )
        self._offsets[index] = len(prompt.texts[0])
        self._extend(index, columns, prompt.tokens)
        return columns

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenText], finish: TextFinish | None
    ) -> replies.CompletionChoice:
        return replies.CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, tokens) if self.wants_logprobs else None,
            finish_reason=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop,
        )

    def _logprobs(self, index: int, tokens: Sequence[TokenText]) -> replies.CompletionLogprobs:
        columns = replies.CompletionLogprobs()
        self._extend(index, columns, tokens)
        return columns

    def _extend(self, index: int, columns: replies.CompletionLogprobs, tokens: Sequence[TokenText]) -> None:
        offset = self._offsets.get(index, 0)
        for token in tokens:
            columns.tokens.append(token.text)
            columns.token_logprobs.append(token.logprob)
            columns.top_logprobs.append(_by_text((*token.top[: self._num_logprobs], token)))
            columns.text_offset.append(offset)
            offset += len(token.text)
        self._offsets[index] = offset


def _message(choice: Choice) -> replies.AnswerMessage:
    calls = [
        replies.WireCall(
            id=call.id, type="function", function=replies.CalledFunction(name=call.name, arguments=call.arguments)
        )
        for call in choice.tool_calls
    ]
    return replies.AnswerMessage(
        content=choice.text or (None if calls else ""),
        reasoning_content=choice.reasoning or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )


def _usage(usage: Usage) -> replies.WireUsage:
    return replies.WireUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=replies.PromptTokensDetails(usage.cached_tokens),
        completion_tokens_details=replies.CompletionTokensDetails(usage.reasoning_tokens),
    )


def _by_text(tokens: Sequence[TokenText]) -> dict[str, float]:
    """Logprobs of the likeliest tokens, in this order, and of the one that came; of tokens with one text (parts of
    characters) the likeliest."""
    logprobs: dict[str, float] = {}
    for token in tokens:
        logprobs.setdefault(token.text, token.logprob)
    return logprobs


def _rivals(token: TokenText, count: int) -> dict[str, replies.PromptLogprob]:
    tokens = {each.id: each for each in (token, *token.top[:count])}
    return {str(each.id): replies.PromptLogprob(each.logprob, each.rank or 0, each.text) for each in tokens.values()}


def token_logprobs(tokens: Sequence[TokenText]) -> list[replies.TokenLogprob]:
    """Tokens with their logprobs and their rivals'."""
    return [
        replies.TokenLogprob(
            token=token.text,
            logprob=token.logprob,
            bytes=list(token.bytes),
            top_logprobs=[
                replies.TopLogprob(token=top.text, logprob=top.logprob, bytes=list(top.bytes)) for top in token.top
            ],
        )
        for token in tokens
    ]


def _chat_logprobs(tokens: Sequence[TokenText]) -> replies.ChatLogprobs:
    return replies.ChatLogprobs(content=token_logprobs(tokens))
