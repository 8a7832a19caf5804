"""Where text meets tokens: one `Service` per loaded model.

A request is rendered, encoded and checked, its ids go to the engine, and the ids that come back become text. Whatever
is wrong with a request is raised before its first event, so that a server can still choose the status line.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec

from pelton.answering import Answer, Asked
from pelton.best_of import best_of
from pelton.checks import check_policy, check_range, check_sampling, check_tools
from pelton.embedding import Embedder
from pelton.engine.client import error_of
from pelton.engine.contract import Engine
from pelton.engine.protocol import PinInfo, Vocabulary
from pelton.errors import InvalidRequest
from pelton.prompting import EncodedPrompt, Model, Prompts
from pelton.request import (
    EngineRequest,
    ErrorEvent,
    Grammar,
    Pooling,
    Request,
    SamplingParams,
    TextEvent,
)
from pelton.text.enforcement import Enforcement, enforcement_of
from pelton.text.prompt_logprobs import AskedPrompt
from pelton.text.words import TokenSearch, spellings

if TYPE_CHECKING:
    from pelton.hub.preset import Preset
    from pelton.text.tokenizer import Tokenizer

MIN_TTL, MAX_TTL = 1, 7 * 24 * 3600
"""Seconds that a prompt may be pinned."""
MAX_GRAMMAR = 128 << 10
"""Characters of a schema or a grammar: what is longer takes seconds to compile, and longer masks."""

NUM_CHECKS = 2
"""In which a model's answers are checked against their schemas."""


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
        self._preset = preset
        self._model = Model(tokenizer, engine)
        self._prompts = Prompts(self._model, metadata, tool_dialect)
        self._embedder = Embedder(self._model, engine, metadata, pooling)
        self._search = TokenSearch(tokenizer)
        self._checks = ThreadPoolExecutor(NUM_CHECKS, thread_name_prefix="pelton check")
        """Where answers are checked. A schema that takes all the time that it may keeps this model's alone waiting."""
        self._prepared: WeakValueDictionary[str, EncodedPrompt] = WeakValueDictionary()
        """By their requests' ids: what `generate` need not make again."""

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._model.context

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
        return self._model.vocab_size

    async def encode(self, request: Request) -> list[int]:
        """The prompt's ids, begin token included. A `prompt` is plain text: control tokens in it stay text."""
        return (await self._prompts.make(self.as_meant(request))).ids

    async def prepare(self, request: Request) -> EncodedPrompt:
        """The prompt of a request that is to be started: as long as this is held, `generate` takes it."""
        prompt = await self._prompts.make(self.as_meant(request))
        self._prepared[request.id] = prompt
        return prompt

    async def render(self, request: Request) -> str:
        """A chat as its template writes it, control tokens by their names."""
        return (await self._prompts.make(self.as_meant(request))).text

    async def encode_text(self, text: str, *, add_special: bool, is_marked: bool) -> list[int]:
        """The ids of a text. `add_special`: with the tokens that the model wants around it. `is_marked`: names of
        control tokens in it are those tokens; for clients who may write such."""
        self._prompts.check_length(len(text), "prompt")
        return await asyncio.to_thread(self._prompts.encode, text, add_special=add_special, is_marked=is_marked)

    async def encode_infill(
        self, prefix: str, suffix: str, begun: str = "", files: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        """The prompt for the text between two others, which begins with `begun`; `files` (name, text) stand around it.
        Raises `InvalidRequest` for a model that cannot."""
        return await asyncio.to_thread(self._prompts.infill, prefix, suffix, begun, files, param="input_suffix")

    @property
    def chat_template(self) -> str | None:
        """The template that the file has for chats."""
        return self._prompts.template

    async def generate(self, request: Request) -> AsyncGenerator[TextEvent, None]:
        """Start a request. What is wrong with it is raised by awaiting this; the stream that it gives then ends in
        one `TextDone`, or raises what went wrong; each choice ends in one `TextFinish` before that. Closing the stream
        early aborts the request.

        `max_tokens` over what the context has left is cut to that; the choice then ends with reason "length".
        """
        if request.embedding is not None:
            return await self._embedder.start(request, request.embedding)
        request = self.as_meant(request)
        self._check(request)
        prompt = self._prepared.get(request.id) or await self._prompts.make(request)
        sampling = self._complete(request.sampling, len(prompt.ids), _source_of(request))
        enforced = await asyncio.to_thread(enforcement_of, request, prompt.form, self.tokenizer.control_id)
        if enforced.grammar is not None or enforced.thinking is not None:
            await self._prepare(enforced.grammar, sampling)
        engine_request = EngineRequest(
            id=request.id,
            prompt_ids=prompt.ids,
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

    async def pin(self, request: Request, ttl: float) -> None:
        """Compute a request's prompt where it is not cached, and keep it in KV memory for so many seconds, under the
        request's id. Raises what is wrong with it, or that there is no room for it."""
        check_range("ttl", ttl, MIN_TTL, MAX_TTL)
        prompt_ids = await self.encode(request)
        if len(prompt_ids) >= self.context:
            raise self._prompts.too_long(len(prompt_ids), _source_of(request))
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

    def _check(self, request: Request) -> None:
        check_sampling(request.sampling, self.vocab_size)
        if request.sampling.max_tokens == 0 and request.sampling.prompt_logprobs is None and not request.echo:
            raise InvalidRequest("max_tokens 0 asks for no answer, and nothing about the prompt", param="max_tokens")
        check_policy(request)
        check_tools(request)

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

    def _complete(self, sampling: SamplingParams, num_prompt: int, source: str) -> SamplingParams:
        """With a seed, and with `max_tokens` that fits the context. `source`: the field that the prompt came from."""
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty", param=source)
        room = self.context - num_prompt
        if room < (sampling.max_tokens != 0):
            raise self._prompts.too_long(num_prompt, source)
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


def _source_of(request: Request) -> str:
    """The field that its prompt comes from."""
    return "messages" if request.messages is not None else "prompt"


def _for_engine(sampling: SamplingParams) -> SamplingParams:
    """Without what is the service's matter. Where the best choices are sought, the engine makes all and says how likely
    each is."""
    made = sampling.best_of or sampling.n
    logprobs = sampling.logprobs if made == sampling.n else (sampling.logprobs or 0)
    return msgspec.structs.replace(
        sampling, n=made, best_of=None, logprobs=logprobs, stop=(), bad_words=(), dry_sequence_breakers=()
    )
