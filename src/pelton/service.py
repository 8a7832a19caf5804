"""Where text meets tokens: one `Service` per loaded model.

A request is rendered, encoded and checked, its ids go to the engine, and the ids that come back become text. Whatever
is wrong with a request is raised before its first event, so that a server can still choose the status line.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pelton.best_of import best_of
from pelton.checks import check_ids, check_range, check_sampling
from pelton.engine.client import error_of
from pelton.engine.protocol import Counters, EngineInfo, PinInfo, Vocabulary
from pelton.errors import ContextLengthExceeded, InternalError, InvalidRequest
from pelton.request import (
    Accepted,
    Done,
    EngineRequest,
    ErrorEvent,
    Event,
    Finish,
    Grammar,
    Message,
    PromptEvent,
    Request,
    SamplingParams,
    TextDelta,
    TextDone,
    TextEvent,
    TextFinish,
    TokenEvent,
    TokenText,
    Usage,
)
from pelton.text.chat import ChatTemplate
from pelton.text.disguise import strings
from pelton.text.prompt_logprobs import AskedPrompt, token_text
from pelton.text.stream import TextStream
from pelton.text.words import TokenSearch, spellings

if TYPE_CHECKING:
    from pelton.text.tokenizer import Tokenizer

MAX_PRIORITY = 1 << 31
MIN_TIMEOUT = 0.001
MIN_TTL, MAX_TTL = 1, 7 * 24 * 3600
"""Seconds that a prompt may be pinned."""
MAX_GRAMMAR = 128 << 10
"""Characters of a schema or a grammar: what is longer takes seconds to compile, and longer masks."""


class Engine(Protocol):
    """What a service needs of an engine's client."""

    @property
    def info(self) -> EngineInfo:
        """What is loaded."""
        ...

    def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        """The events of a request; closing them early aborts it."""
        ...

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its choices."""
        ...

    @property
    def counters(self) -> Counters:
        """What was done so far, and what is held now."""
        ...

    def unpin(self, request_id: str) -> None:
        """Pin the prompt of that request no longer."""
        ...

    @property
    def has_vocabulary(self) -> bool:
        """Has it been taught what grammars are made of?"""
        ...

    def teach(self, vocabulary: Vocabulary) -> None:
        """What grammars are made of."""
        ...

    async def close(self) -> None:
        """End the engine."""
        ...


class Service:
    """One loaded model: requests in, text events out. All methods belong to one event loop."""

    def __init__(
        self, name: str, path: Path, tokenizer: Tokenizer, metadata: Mapping[str, Any], engine: Engine
    ) -> None:
        self.name = name
        self.path = path
        self.tokenizer = tokenizer
        self.engine = engine
        self._metadata = metadata
        self._template: ChatTemplate | None = None
        self._search = TokenSearch(tokenizer)

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.engine.info.context

    @property
    def weight_bytes(self) -> int:
        """Of the weights in memory."""
        return self.engine.info.weight_bytes

    @property
    def fingerprint(self) -> str | None:
        """The numerics fingerprint: equal fingerprints give equal bits. None until the model's digest is known."""
        return self.engine.info.fingerprint

    @property
    def vocab_size(self) -> int:
        """Ids of [0, vocab_size) may be used in requests."""
        return min(self.tokenizer.vocab_size, self.engine.info.vocab_size)

    async def encode(self, request: Request) -> list[int]:
        """The prompt's ids, begin token included. A `prompt` is plain text: control tokens in it stay text."""
        given = [request.messages is not None, request.prompt is not None, request.prompt_ids is not None]
        if sum(given) != 1:
            raise InvalidRequest("exactly one of messages, prompt and prompt_ids must be given", param="messages")
        if request.prompt_ids is not None:
            check_ids(request.prompt_ids, self.vocab_size, "prompt")
            return list(request.prompt_ids)
        return await asyncio.to_thread(self._encode_text, request)

    async def generate(self, request: Request) -> AsyncGenerator[TextEvent, None]:
        """Start a request. What is wrong with it is raised by awaiting this; the stream that it gives then ends in
        one `TextDone`, or raises what went wrong; each choice ends in one `TextFinish` before that. Closing the stream
        early aborts the request.

        `max_tokens` over what the context has left is cut to that; the choice then ends with reason "length".
        """
        check_sampling(request.sampling, self.vocab_size)
        if request.sampling.max_tokens == 0 and request.sampling.prompt_logprobs is None and not request.echo:
            raise InvalidRequest("max_tokens 0 asks for no answer, and nothing about the prompt", param="max_tokens")
        _check_policy(request)
        prompt_ids = await self.encode(request)
        source = "messages" if request.messages is not None else "prompt"
        sampling = self._complete(request.sampling, len(prompt_ids), source)
        if request.grammar is not None:
            if sampling.use_beam_search:
                raise InvalidRequest(
                    f"{request.grammar.param} cannot be used with use_beam_search", param=request.grammar.param
                )
            await self._prepare_grammar(request.grammar)
        engine_request = EngineRequest(
            id=request.id,
            prompt_ids=prompt_ids,
            sampling=_for_engine(sampling),
            end_ids=self.tokenizer.end_ids,
            bad_words_ids=spellings(self.tokenizer, sampling.bad_words),
            dry_breaker_ids=await self._breaker_ids(sampling),
            priority=request.priority,
            tenant=request.user or "",
            timeout=request.timeout,
            queue_timeout=request.queue_timeout,
            cache_salt=request.cache_salt,
            grammar=request.grammar,
        )
        prompt = AskedPrompt(self.tokenizer, request, engine_request)
        answer = _Answer(self, engine_request, sampling, prompt)
        events = answer.events()
        if (made := engine_request.sampling.n) > sampling.n:
            events = best_of(events, sampling.n, made, answer.logprob)
        await anext(events)  # The acceptance. From here on, closing `events` aborts the request.
        return events

    async def pin(self, request: Request, ttl: float) -> None:
        """Compute a request's prompt where it is not cached, and keep it in KV memory for so many seconds, under the
        request's id. Raises what is wrong with it, or that there is no room for it."""
        check_range("ttl", ttl, MIN_TTL, MAX_TTL)
        prompt_ids = await self.encode(request)
        if len(prompt_ids) >= self.context:
            raise self._too_long(len(prompt_ids), "messages" if request.messages is not None else "prompt")
        engine_request = EngineRequest(
            id=request.id,
            prompt_ids=prompt_ids,
            sampling=SamplingParams(max_tokens=0, seed=0),
            cache_salt=request.cache_salt,
            pin_ttl=ttl,
        )
        async for event in self.engine.submit(engine_request):
            if isinstance(event, ErrorEvent):
                raise error_of(event)

    @property
    def pins(self) -> list[PinInfo]:
        """What is pinned now."""
        now = time.time()
        return [pin for pin in self.engine.counters.pins if pin.expires_at > now]

    def unpin(self, request_id: str) -> None:
        """Pin the prompt of that request no longer."""
        self.engine.unpin(request_id)

    async def _prepare_grammar(self, grammar: Grammar) -> None:
        if len(grammar.text) > MAX_GRAMMAR:
            raise InvalidRequest(
                f"{grammar.param} has {len(grammar.text)} characters, over {MAX_GRAMMAR}", param=grammar.param
            )
        if not self.engine.has_vocabulary:
            self.engine.teach(await asyncio.to_thread(self._vocabulary))

    def _vocabulary(self) -> Vocabulary:
        tokenizer = self.tokenizer
        ids = range(self.vocab_size)
        return Vocabulary(
            tokens=[tokenizer.token_bytes(id) for id in ids],
            control_ids=[id for id in ids if tokenizer.is_control(id)],
            end_ids=list(tokenizer.end_ids),
        )

    async def close(self) -> None:
        """End the engine; requests in flight get `Unavailable`."""
        await self.engine.close()

    async def _breaker_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        if sampling.dry_multiplier <= 0:
            return ()
        return await asyncio.to_thread(self._search.ids_with, sampling.dry_sequence_breakers)

    def _encode_text(self, request: Request) -> list[int]:
        if request.prompt is not None:
            self._check_length(len(request.prompt), "prompt")
            return self.tokenizer.encode(request.prompt, add_special=True)
        assert request.messages is not None
        self._check_chat(request.messages, request)
        if self._template is None:
            self._template = ChatTemplate.from_metadata(self._metadata, self.tokenizer)
        prompt = self._template.render(
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.template_kwargs,
        )
        self._check_length(sum(len(each) for each in prompt.segments if isinstance(each, str)), "messages")
        return self.tokenizer.encode_segments(prompt.segments)

    def _check_chat(self, messages: Sequence[Message], request: Request) -> None:
        """Refuse a chat far over the context before its template reads it: that keeps everybody else waiting, seconds
        for each ten million characters."""
        given = [[each.content, each.reasoning_content, each.name, each.tool_calls] for each in messages]
        num_characters = sum(map(len, strings([given, request.tools, request.template_kwargs])))
        limit = self.context * self.tokenizer.max_token_length
        if num_characters > limit:
            raise ContextLengthExceeded(
                f"the chat has {num_characters} characters, over the {limit} that the context of this model, "
                f"{self.context} tokens, can have at the very most",
                param="messages",
            )

    def _check_length(self, num_characters: int, source: str) -> None:
        """Refuse a text that cannot fit, however it is cut into tokens: encoding takes over a hundred bytes of memory
        for each of its characters, and seconds for each million."""
        least = -(-num_characters // self.tokenizer.max_token_length)
        if least >= self.context:
            raise self._too_long(f"at least {least}", source)

    def _too_long(self, num_tokens: int | str, source: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens, but the context of this model is {self.context} tokens "
            "and an answer needs one at least",
            param=source,
        )

    def _complete(self, sampling: SamplingParams, num_prompt: int, source: str) -> SamplingParams:
        """With a seed, and with `max_tokens` that fits the context. `source`: the field that the prompt came from."""
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty", param=source)
        room = self.context - num_prompt
        if room < (sampling.max_tokens != 0):
            raise self._too_long(num_prompt, source)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return msgspec.structs.replace(
            sampling,
            max_tokens=limit,
            min_tokens=min(sampling.min_tokens, limit),
            seed=seed,
            top_k=max(sampling.top_k, 0),
            top_n_sigma=max(sampling.top_n_sigma, 0.0),
        )


@dataclass
class _Choice:
    """One choice under way."""

    stream: TextStream
    num_tokens: int = 0
    """Tokens so far, the one that ended it included."""
    unsent: list[int] = field(default_factory=list)
    """Tokens since the last piece."""
    logprob: float = 0.0
    """Of all tokens so far together, where the engine told it."""
    is_finished: bool = False


class _Answer:
    """A request under way: the engine's events -> text events."""

    def __init__(self, service: Service, request: EngineRequest, sampling: SamplingParams, prompt: AskedPrompt) -> None:
        self._prompt = prompt
        self._engine = service.engine
        self._tokenizer = service.tokenizer
        self._request = request
        self._wants_logprobs = sampling.logprobs is not None
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._is_accepted = False
        self._choices = [
            _Choice(
                TextStream(
                    service.tokenizer,
                    stop=sampling.stop,
                    include_stop=sampling.include_stop_str_in_output,
                    skip_special=sampling.skip_special_tokens,
                    min_tokens=sampling.min_tokens,
                )
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
                    case Accepted():
                        self._is_accepted = True
                        yield TextDelta(choice=0, text="")
                        for told in self._prompt.start():
                            yield told
                    case PromptEvent():
                        for told in self._prompt.take(event):
                            yield told
                    case TokenEvent():
                        for piece in self._take(event):
                            yield piece
                    case Finish():
                        for piece in self._end(event):
                            yield piece
                    case Done(usage=usage):
                        yield TextDone(usage=self._count(usage))
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

    def _take(self, event: TokenEvent) -> list[TextEvent]:
        choice = self._choices[event.choice]
        if choice.is_finished:  # A stop string has ended it; the engine hears of it only now.
            return []
        choice.num_tokens += 1
        choice.logprob += event.logprob or 0.0
        choice.unsent.append(event.token_id)
        text = choice.stream.feed(event.token_id)
        tokens = (self._token_text(event),) if self._wants_logprobs else ()
        pieces = self._piece(event.choice, text, tokens) if text or tokens else []
        if choice.stream.stopped_by is not None:
            self._engine.abort(self._request.id, event.choice)
            pieces += self._finish(event.choice, TextFinish(choice=event.choice, reason="stop"))
        return pieces

    def _end(self, event: Finish) -> list[TextEvent]:
        choice = self._choices[event.choice]
        if choice.is_finished:
            return []
        choice.num_tokens += event.stop_id is not None
        choice.logprob += event.logprob or 0.0
        stop = event.stop_id if event.stop_id in self._stop_ids else None
        return self._finish(event.choice, TextFinish(choice=event.choice, reason=event.reason, stop=stop))

    def _finish(self, index: int, finish: TextFinish) -> list[TextEvent]:
        choice = self._choices[index]
        text = choice.stream.finish()
        choice.is_finished = True
        pieces = self._piece(index, text, ()) if text or choice.unsent else []
        if choice.stream.stopped_by is not None:
            finish = TextFinish(choice=index, reason="stop", stop=choice.stream.stopped_by)
        return [*pieces, finish]

    def _fail(self) -> list[TextEvent]:
        """End the choices that are still open when an error is about to be raised."""
        failed = [i for i, choice in enumerate(self._choices) if self._is_accepted and not choice.is_finished]
        for i in failed:
            self._choices[i].is_finished = True
        return [TextFinish(choice=i, reason="error") for i in failed]

    def _piece(self, index: int, text: str, tokens: tuple[TokenText, ...]) -> list[TextEvent]:
        token_ids, self._choices[index].unsent = tuple(self._choices[index].unsent), []
        return [TextDelta(choice=index, text=text, token_ids=token_ids, tokens=tokens)]

    def _token_text(self, event: TokenEvent) -> TokenText:
        if event.logprob is None:
            raise InternalError("the engine sent a token without the logprob that was asked for")
        return token_text(self._tokenizer, event.token_id, event.logprob, event.top)

    def _count(self, usage: Usage) -> Usage:
        """What the engine counted, but without tokens that it made after a stop string was found."""
        return msgspec.structs.replace(usage, completion_tokens=sum(choice.num_tokens for choice in self._choices))


def _for_engine(sampling: SamplingParams) -> SamplingParams:
    """Without what is the service's matter. Where the best choices are sought, the engine makes all and says how likely
    each is."""
    made = sampling.best_of or sampling.n
    logprobs = sampling.logprobs if made == sampling.n else (sampling.logprobs or 0)
    return msgspec.structs.replace(
        sampling, n=made, best_of=None, logprobs=logprobs, stop=(), bad_words=(), dry_sequence_breakers=()
    )


def _check_policy(request: Request) -> None:
    check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    for name, seconds in (("timeout", request.timeout), ("queue_timeout", request.queue_timeout)):
        if seconds is not None:
            check_range(name, seconds, MIN_TIMEOUT, math.inf)
