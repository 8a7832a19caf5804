"""A request -> its prompt: a chat through the model's template or the request's own, a text, ids, or what stands around
a gap."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pelton.checks import check_ids
from pelton.errors import ContextLengthExceeded, InvalidRequest
from pelton.request import Message, Request
from pelton.text.chat import ChatTemplate, with_template
from pelton.text.disguise import strings
from pelton.text.infill import File, Infill
from pelton.text.output import Format
from pelton.text.reasoning import is_open, switches_of, tags_of
from pelton.text.tools.detect import DIALECTS, dialect_of, shows_tools
from pelton.text.tools.dialect import Dialect
from pelton.text.tools.prompt import template_form, told_in_text

if TYPE_CHECKING:
    from pelton.engine.contract import Engine
    from pelton.text.tokenizer import Tokenizer

NUM_THREADS = 4
"""In which a model's prompts are made."""
MAX_TEMPLATE = 64 << 10
"""Characters of a request's own chat template."""


class Model:
    """What texts for a model are made with, and bounded by."""

    def __init__(self, tokenizer: Tokenizer, engine: Engine) -> None:
        self.tokenizer = tokenizer
        self._engine = engine

    @property
    def context(self) -> int:
        """Tokens that prompt and answer, or a text that is embedded, may have."""
        return self._engine.info.context

    @property
    def vocab_size(self) -> int:
        """Ids of [0, vocab_size) may be used."""
        return min(self.tokenizer.vocab_size, self._engine.info.vocab_size)


@dataclass(frozen=True)
class EncodedPrompt:
    """An encoded prompt, and how its answer is to be read."""

    ids: list[int]
    form: Format = field(default_factory=Format)
    warnings: tuple[str, ...] = ()
    text: str = ""
    """What the template made of a chat."""


class Prompts:
    """Those of one model. `metadata`: of its file; `tool_dialect`: as in the settings."""

    def __init__(self, model: Model, metadata: Mapping[str, Any], tool_dialect: str) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self._metadata = metadata
        self._tool_dialect = tool_dialect
        self._template: ChatTemplate | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pelton chat")
        """Where prompts are made. A template that takes all the time that it may keeps this model's waiting alone."""
        self._own_templates = asyncio.Semaphore(NUM_THREADS // 2)
        """For requests that bring a template, which leave threads to others."""

    @property
    def template(self) -> str | None:
        """The template that the file has for chats."""
        source = self._metadata.get("tokenizer.chat_template")
        return source if isinstance(source, str) else None

    async def make(self, request: Request) -> EncodedPrompt:
        """What the model reads of a request."""
        given = [request.messages is not None, request.prompt is not None, request.prompt_ids is not None]
        if sum(given) != 1:
            raise InvalidRequest("exactly one of messages, prompt and prompt_ids must be given", param="messages")
        if request.prompt_ids is not None:
            if len(request.prompt_ids) > self._model.context:
                raise self.too_long(len(request.prompt_ids), "prompt")
            check_ids(request.prompt_ids, self._model.vocab_size, "prompt")
            return EncodedPrompt(list(request.prompt_ids))
        if request.chat_template is not None:
            await self._own_templates.acquire()
        making = self._threads.submit(copy_context().run, self._make, request)
        if request.chat_template is not None:  # until it has ended, not only until nobody waits for it
            making.add_done_callback(partial(_release, self._own_templates, asyncio.get_running_loop()))
        return await asyncio.wrap_future(making)

    def _make(self, request: Request) -> EncodedPrompt:
        if request.prompt is not None and request.suffix is not None:
            return EncodedPrompt(self.infill(request.prompt, request.suffix, param="suffix"))
        if request.prompt is not None:
            self.check_length(len(request.prompt), "prompt")
            return EncodedPrompt(self._tokenizer.encode(request.prompt, add_special=True))
        assert request.messages is not None
        # Where no tool may be called, none is shown: the model would call them all the same.
        tools = request.tools if request.tool_choice.mode != "none" else ()
        forms = [template_form(tool) for tool in tools]
        self._check_chat(request.messages, forms, request)
        template = self._template_of(request)
        source = template.source(has_tools=bool(tools))
        tags = tags_of(source, self._tokenizer.control_texts)
        switches = switches_of(source, tags, request)
        knows_tools = shows_tools(source)
        prompt = template.render(
            request.messages if knows_tools else told_in_text(request.messages, tools),
            tools=forms if knows_tools else None,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs={**switches.variables, **request.template_kwargs},
        )
        self.check_length(sum(len(each) for each in prompt.segments if isinstance(each, str)), "messages")
        choice = request.tool_choice
        opened = tags is not None and is_open(prompt.text, tags)
        form = Format(
            tags=tags,
            is_open=opened,
            budget=0 if opened and switches.is_off else switches.budget,
            dialect=self._dialect(source) if tools else None,
            names=choice.names or [tool.name for tool in tools],
        )
        return EncodedPrompt(self._tokenizer.encode_segments(prompt.segments), form, switches.warnings, prompt.text)

    def _template_of(self, request: Request) -> ChatTemplate:
        if request.chat_template is not None:
            if len(request.chat_template) > MAX_TEMPLATE:
                message = f"template has {len(request.chat_template)} characters, over {MAX_TEMPLATE}"
                raise InvalidRequest(message, param="template")
            metadata = with_template(self._metadata, request.chat_template)
            return ChatTemplate.from_metadata(metadata, self._tokenizer, name="the request's chat template")
        if self._template is None:
            self._template = ChatTemplate.from_metadata(self._metadata, self._tokenizer)
        return self._template

    def _dialect(self, template: str) -> Dialect:
        return dialect_of(template) if self._tool_dialect == "auto" else DIALECTS[self._tool_dialect]

    def _check_chat(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], request: Request) -> None:
        """Refuse a chat far over the context before its template reads it: that keeps everybody else waiting, seconds
        for each ten million characters."""
        given = [[each.content, each.reasoning_content, each.name, each.tool_calls] for each in messages]
        num_characters = sum(map(len, strings([given, tools, request.template_kwargs])))
        limit = self._model.context * self._tokenizer.max_token_length
        if num_characters > limit:
            raise ContextLengthExceeded(
                f"the chat has {num_characters} characters, over the {limit} that the context of this model, "
                f"{self._model.context} tokens, can have at the very most",
                param="messages",
            )

    def check_length(self, num_characters: int, source: str) -> None:
        """Refuse a text that cannot fit, however it is cut into tokens: encoding takes over a hundred bytes of memory
        for each of its characters, and seconds for each million."""
        least = -(-num_characters // self._tokenizer.max_token_length)
        if least >= self._model.context:
            raise self.too_long(f"at least {least}", source)

    def too_long(self, num_tokens: int | str, source: str) -> ContextLengthExceeded:
        """What to raise for a prompt of so many tokens."""
        return ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens, but the context of this model is {self._model.context} tokens "
            "and an answer needs one at least",
            param=source,
        )

    def encode(self, text: str, *, add_special: bool, is_marked: bool) -> list[int]:
        """The ids of a text: `Service.encode_text`."""
        encode = self._encode_marked if is_marked else self._tokenizer.encode
        return encode(text, add_special=add_special)

    def _encode_marked(self, text: str, *, add_special: bool) -> list[int]:
        segments: list[str | int] = []
        end = 0
        for start, name in self._tokenizer.find_controls(text):
            id = self._tokenizer.control_id(name)
            assert id is not None
            segments += [text[end:start], id]
            end = start + len(name)
        segments.append(text[end:])
        if add_special:
            return self._tokenizer.encode_segments(segments)
        plain = self._tokenizer.encode
        return [id for each in segments for id in ([each] if isinstance(each, int) else plain(each, add_special=False))]

    def infill(
        self, prefix: str, suffix: str, begun: str = "", files: Sequence[tuple[str, str]] = (), *, param: str
    ) -> list[int]:
        """The ids for the text between two others: `Service.encode_infill`. `param`: the field that asks for it."""
        infill = Infill(self._metadata, self._tokenizer, param)
        segments = infill.segments(prefix, suffix, begun, [File(*f) for f in files])
        self.check_length(sum(len(each) for each in segments if isinstance(each, str)), param)
        return self._tokenizer.encode_segments(segments)


def _release(places: asyncio.Semaphore, loop: asyncio.AbstractEventLoop, _: Future[EncodedPrompt]) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits for a place any more
        loop.call_soon_threadsafe(places.release)
