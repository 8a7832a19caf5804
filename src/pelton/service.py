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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from pelton import embedding
from pelton.answering import Answer, Asked
from pelton.best_of import best_of
from pelton.checks import check_ids, check_range, check_sampling, check_tools
from pelton.engine.client import error_of
from pelton.engine.protocol import Counters, EngineInfo, PinInfo, Vocabulary
from pelton.errors import ContextLengthExceeded, InvalidRequest
from pelton.request import (
    IDLE,
    EmbeddingParams,
    EngineRequest,
    ErrorEvent,
    Event,
    Grammar,
    Message,
    Pooling,
    Request,
    SamplingParams,
    TextEvent,
)
from pelton.text.chat import ChatTemplate, with_template
from pelton.text.disguise import strings
from pelton.text.enforcement import Enforcement, enforcement_of
from pelton.text.infill import File, Infill
from pelton.text.output import Format
from pelton.text.prompt_logprobs import AskedPrompt
from pelton.text.reasoning import is_open, switches_of, tags_of
from pelton.text.tools.detect import DIALECTS, dialect_of, shows_tools
from pelton.text.tools.dialect import Dialect
from pelton.text.tools.prompt import template_form, told_in_text
from pelton.text.words import TokenSearch, spellings

if TYPE_CHECKING:
    from pelton.hub.preset import Preset
    from pelton.text.tokenizer import Tokenizer

MAX_PRIORITY = IDLE
MIN_TIMEOUT = 0.001
MIN_TTL, MAX_TTL = 1, 7 * 24 * 3600
"""Seconds that a prompt may be pinned."""
MAX_GRAMMAR = 128 << 10
"""Characters of a schema or a grammar: what is longer takes seconds to compile, and longer masks."""


NUM_THREADS = 4
"""In which a model's prompts are made."""
NUM_CHECKS = 2
"""In which a model's answers are checked against their schemas."""
MAX_TEMPLATE = 64 << 10
"""Characters of a request's own chat template."""


class Engine(Protocol):
    """What a service needs of an engine's client."""

    @property
    def info(self) -> EngineInfo:
        """What is loaded."""
        ...

    @property
    def pid(self) -> int | None:
        """Of its process, while it has one of its own."""
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
    def trouble(self) -> Exception | None:
        """Why it could not be started again, after it has died."""
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


@dataclass(frozen=True)
class EncodedPrompt:
    """An encoded prompt, and how its answer is to be read."""

    ids: list[int]
    form: Format = field(default_factory=Format)
    warnings: tuple[str, ...] = ()
    text: str = ""
    """What the template made of a chat."""


class Service:
    """One loaded model: requests in, text events out. All methods belong to one event loop."""

    def __init__(
        self,
        name: str,
        path: Path,
        tokenizer: Tokenizer,
        metadata: Mapping[str, Any],
        engine: Engine,
        tool_dialect: str = "auto",
        pooling: Pooling | None = None,
        preset: Preset | None = None,
    ) -> None:
        """`tool_dialect`, `pooling`: as in the settings. `preset`: what its name brings along;
        the template of that stands in `metadata`."""
        self.name = name
        self.path = path
        self.tokenizer = tokenizer
        self.engine = engine
        self._metadata = metadata
        self._tool_dialect = tool_dialect
        self._pooling = pooling
        self._preset = preset
        self._template: ChatTemplate | None = None
        self._search = TokenSearch(tokenizer)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pelton chat")
        """Where prompts are made. A template that takes all the time that it may keeps this model's waiting alone."""
        self._own_templates = asyncio.Semaphore(NUM_THREADS // 2)
        """For requests that bring a template, which leave threads to others."""
        self._checks = ThreadPoolExecutor(NUM_CHECKS, thread_name_prefix="pelton check")
        """Where answers are checked. A schema that takes all the time that it may keeps this model's alone waiting."""
        self._prepared: WeakValueDictionary[str, EncodedPrompt] = WeakValueDictionary()
        """By their requests' ids: what `generate` need not make again."""

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
        return (await self._prompt(self.as_meant(request))).ids

    async def prepare(self, request: Request) -> EncodedPrompt:
        """The prompt of a request that is to be started: as long as this is held, `generate` takes it."""
        prompt = await self._prompt(self.as_meant(request))
        self._prepared[request.id] = prompt
        return prompt

    async def render(self, request: Request) -> str:
        """A chat as its template writes it, control tokens by their names."""
        return (await self._prompt(self.as_meant(request))).text

    async def encode_text(self, text: str, *, add_special: bool, is_marked: bool) -> list[int]:
        """The ids of a text. `add_special`: with the tokens that the model wants around it. `is_marked`: names of
        control tokens in it are those tokens; for clients who may write such."""
        self._check_length(len(text), "prompt")
        encode = self._encode_marked if is_marked else self.tokenizer.encode
        return await asyncio.to_thread(encode, text, add_special=add_special)

    async def encode_infill(
        self, prefix: str, suffix: str, begun: str = "", files: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        """The prompt for the text between two others, which begins with `begun`; `files` (name, text) stand around it.
        Raises `InvalidRequest` for a model that cannot."""
        return await asyncio.to_thread(self._encode_infill, prefix, suffix, begun, files, param="input_suffix")

    def _encode_infill(
        self, prefix: str, suffix: str, begun: str = "", files: Sequence[tuple[str, str]] = (), *, param: str
    ) -> list[int]:
        infill = Infill(self._metadata, self.tokenizer, param)
        segments = infill.segments(prefix, suffix, begun, [File(*f) for f in files])
        self._check_length(sum(len(each) for each in segments if isinstance(each, str)), param)
        return self.tokenizer.encode_segments(segments)

    @property
    def chat_template(self) -> str | None:
        """The template that the file has for chats."""
        source = self._metadata.get("tokenizer.chat_template")
        return source if isinstance(source, str) else None

    async def _prompt(self, request: Request) -> EncodedPrompt:
        given = [request.messages is not None, request.prompt is not None, request.prompt_ids is not None]
        if sum(given) != 1:
            raise InvalidRequest("exactly one of messages, prompt and prompt_ids must be given", param="messages")
        if request.prompt_ids is not None:
            if len(request.prompt_ids) > self.context:
                raise self._too_long(len(request.prompt_ids), "prompt")
            check_ids(request.prompt_ids, self.vocab_size, "prompt")
            return EncodedPrompt(list(request.prompt_ids))
        if request.chat_template is not None:
            await self._own_templates.acquire()
        making = self._threads.submit(copy_context().run, self._encode_text, request)
        if request.chat_template is not None:  # until it has ended, not only until nobody waits for it
            making.add_done_callback(partial(_release, self._own_templates, asyncio.get_running_loop()))
        return await asyncio.wrap_future(making)

    async def generate(self, request: Request) -> AsyncGenerator[TextEvent, None]:
        """Start a request. What is wrong with it is raised by awaiting this; the stream that it gives then ends in
        one `TextDone`, or raises what went wrong; each choice ends in one `TextFinish` before that. Closing the stream
        early aborts the request.

        `max_tokens` over what the context has left is cut to that; the choice then ends with reason "length".
        """
        if request.embedding is not None:
            return await self._embed(request, request.embedding)
        request = self.as_meant(request)
        check_sampling(request.sampling, self.vocab_size)
        if request.sampling.max_tokens == 0 and request.sampling.prompt_logprobs is None and not request.echo:
            raise InvalidRequest("max_tokens 0 asks for no answer, and nothing about the prompt", param="max_tokens")
        _check_policy(request)
        check_tools(request)
        prompt = self._prepared.get(request.id) or await self._prompt(request)
        prompt_ids = prompt.ids
        source = "messages" if request.messages is not None else "prompt"
        sampling = self._complete(request.sampling, len(prompt_ids), source)
        enforced = await asyncio.to_thread(enforcement_of, request, prompt.form, self.tokenizer.control_id)
        if enforced.grammar is not None or enforced.thinking is not None:
            await self._prepare(enforced.grammar, sampling)
        engine_request = EngineRequest(
            id=request.id,
            prompt_ids=prompt_ids,
            sampling=_for_engine(sampling),
            end_ids=self.tokenizer.end_ids,
            bad_words_ids=spellings(self.tokenizer, sampling.bad_words),
            dry_breaker_ids=await self._breaker_ids(sampling),
            priority=request.priority,
            tenant=request.tenant or request.user or "",
            timeout=request.timeout,
            queue_timeout=request.queue_timeout,
            cache_salt=request.cache_salt,
            grammar=enforced.grammar,
            thinking=enforced.thinking,
        )
        asked = Asked(
            sampling,
            enforced,
            is_one_call=not request.parallel_tool_calls,
            warnings=prompt.warnings,
        )
        answer = Answer(self, engine_request, asked, AskedPrompt(self.tokenizer, request, engine_request))
        events = answer.events()
        if (made := engine_request.sampling.n) > sampling.n:
            events = best_of(events, sampling.n, made, answer.logprob)
        await anext(events)  # The acceptance. From here on, closing `events` aborts the request.
        return events

    async def _embed(self, request: Request, params: EmbeddingParams) -> AsyncGenerator[TextEvent, None]:
        """`generate`, for a text that is embedded."""
        _check_policy(request)
        if params.dimensions is not None:
            check_range("dimensions", params.dimensions, 1, self.engine.info.width)
        text = await asyncio.to_thread(embedding.read, self, request, params.truncation)
        engine_request = EngineRequest(
            id=request.id,
            prompt_ids=text.ids,
            sampling=SamplingParams(max_tokens=0, seed=0),
            pooling=embedding.pooling_of(self._metadata, params.pooling, self._pooling),
            priority=request.priority,
            tenant=request.tenant or request.user or "",
            timeout=request.timeout,
            queue_timeout=request.queue_timeout,
            cache_salt=request.cache_salt,
        )
        events = embedding.embed(self.engine, engine_request, params, text.warnings)
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

    async def faults(self, enforced: Enforcement, text: str, calls: list[tuple[str, str]]) -> list[str]:
        """What a finished answer does not fulfil: `Enforcement.faults`."""
        return await asyncio.get_running_loop().run_in_executor(self._checks, enforced.faults, text, calls)

    def as_meant(self, request: Request) -> Request:
        """The request with what the model's name brings along."""
        return request if self._preset is None else self._preset.applied(request)

    async def _prepare(self, grammar: Grammar | None, sampling: SamplingParams) -> None:
        """Before a request whose tokens are constrained."""
        param = "reasoning_budget" if grammar is None else grammar.param
        if sampling.use_beam_search:
            raise InvalidRequest(f"{param} cannot be used with use_beam_search", param=param)
        if grammar is not None and len(grammar.text) > MAX_GRAMMAR:
            raise InvalidRequest(f"{param} has {len(grammar.text)} characters, over {MAX_GRAMMAR}", param=param)
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

    def _encode_marked(self, text: str, *, add_special: bool) -> list[int]:
        segments: list[str | int] = []
        end = 0
        for start, name in self.tokenizer.find_controls(text):
            id = self.tokenizer.control_id(name)
            assert id is not None
            segments += [text[end:start], id]
            end = start + len(name)
        segments.append(text[end:])
        if add_special:
            return self.tokenizer.encode_segments(segments)
        plain = self.tokenizer.encode
        return [id for each in segments for id in ([each] if isinstance(each, int) else plain(each, add_special=False))]

    def _encode_text(self, request: Request) -> EncodedPrompt:
        if request.prompt is not None and request.suffix is not None:
            return EncodedPrompt(self._encode_infill(request.prompt, request.suffix, param="suffix"))
        if request.prompt is not None:
            self._check_length(len(request.prompt), "prompt")
            return EncodedPrompt(self.tokenizer.encode(request.prompt, add_special=True))
        assert request.messages is not None
        # Where no tool may be called, none is shown: the model would call them all the same.
        tools = request.tools if request.tool_choice.mode != "none" else ()
        forms = [template_form(tool) for tool in tools]
        self._check_chat(request.messages, forms, request)
        template = self._template_of(request)
        source = template.source(has_tools=bool(tools))
        tags = tags_of(source, self.tokenizer.control_texts)
        switches = switches_of(source, tags, request)
        knows_tools = shows_tools(source)
        prompt = template.render(
            request.messages if knows_tools else told_in_text(request.messages, tools),
            tools=forms if knows_tools else None,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs={**switches.variables, **request.template_kwargs},
        )
        self._check_length(sum(len(each) for each in prompt.segments if isinstance(each, str)), "messages")
        choice = request.tool_choice
        opened = tags is not None and is_open(prompt.text, tags)
        form = Format(
            tags=tags,
            is_open=opened,
            budget=0 if opened and switches.is_off else switches.budget,
            dialect=self._dialect(source) if tools else None,
            names=choice.names or [tool.name for tool in tools],
        )
        return EncodedPrompt(self.tokenizer.encode_segments(prompt.segments), form, switches.warnings, prompt.text)

    def _template_of(self, request: Request) -> ChatTemplate:
        if request.chat_template is not None:
            if len(request.chat_template) > MAX_TEMPLATE:
                message = f"template has {len(request.chat_template)} characters, over {MAX_TEMPLATE}"
                raise InvalidRequest(message, param="template")
            metadata = with_template(self._metadata, request.chat_template)
            return ChatTemplate.from_metadata(metadata, self.tokenizer, name="the request's chat template")
        if self._template is None:
            self._template = ChatTemplate.from_metadata(self._metadata, self.tokenizer)
        return self._template

    def _dialect(self, template: str) -> Dialect:
        return dialect_of(template) if self._tool_dialect == "auto" else DIALECTS[self._tool_dialect]

    def _check_chat(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], request: Request) -> None:
        """Refuse a chat far over the context before its template reads it: that keeps everybody else waiting, seconds
        for each ten million characters."""
        given = [[each.content, each.reasoning_content, each.name, each.tool_calls] for each in messages]
        num_characters = sum(map(len, strings([given, tools, request.template_kwargs])))
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


def _release(places: asyncio.Semaphore, loop: asyncio.AbstractEventLoop, _: Future[EncodedPrompt]) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits for a place any more
        loop.call_soon_threadsafe(places.release)


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
