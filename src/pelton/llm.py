"""The library: `LLM("smollm2").chat([...])`, over the same pool and service as the server."""

from __future__ import annotations

import asyncio
import operator
import os
import secrets
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import msgspec

from pelton import config, structured
from pelton.errors import InvalidRequest, Unavailable
from pelton.folding import Choice, all_of, embedded_of
from pelton.pool import Pool
from pelton.progress.display import Display
from pelton.request import (
    AnswerReason,
    EmbeddingParams,
    Grammar,
    Message,
    Pooling,
    Request,
    SamplingParams,
    TextDone,
    TextEvent,
    TextPrompt,
    TokenText,
    Tool,
    ToolCall,
    ToolChoice,
    Usage,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pelton.service import Service

T = TypeVar("T")
Fold = Callable[[Request, AsyncIterator[TextEvent]], Awaitable[tuple[T, Usage]]]
"""A request's events -> its answer, and what that used."""
Prompt = str | Sequence[int]
Conversation = Sequence[Message | Mapping[str, Any]]


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """One choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """Without the token that ended the turn."""
    finish_reason: AnswerReason
    """stop: the model or a stop string ended it; length: `max_tokens` or the context did; tool_calls: as stop, and it
    has called tools."""
    stop: str | int | None = None
    """The stop string or the one of `stop_token_ids` that ended it, if one did."""
    logprobs: tuple[TokenText, ...] | None = None
    """Each token with its logprob and its likeliest rivals, where `SamplingParams.logprobs` asked for them."""
    reasoning: str = ""
    """What the model thought before it answered."""
    tool_calls: tuple[ToolCall, ...] = ()
    warnings: tuple[str, ...] = ()
    """What is to be known of this answer: sentences."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt: `SamplingParams.n` outputs. `text` and its like are those of the first."""

    outputs: tuple[Output, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenText | None, ...] | None = None
    """Each token of the prompt with its logprob and its likeliest rivals, where `SamplingParams.prompt_logprobs` asked
    for them; None for the first."""

    @property
    def text(self) -> str:
        """The first output's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first output's tokens."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> AnswerReason:
        """Why the first output ended."""
        return self.outputs[0].finish_reason

    @property
    def reasoning(self) -> str:
        """What the model thought before the first output."""
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The first output's calls."""
        return self.outputs[0].tool_calls

    @property
    def logprobs(self) -> tuple[TokenText, ...] | None:
        """The first output's logprobs."""
        return self.outputs[0].logprobs


class LLM:
    """A loaded model. Thread-safe, and a context manager.

    >>> with LLM("smollm2") as llm:
    ...     [answer] = llm.chat([{"role": "user", "content": "Why is the sky blue?"}])
    ...     print(answer.text)
    """

    def __init__(self, model: str, *, in_process: bool = False, **settings: Any) -> None:
        """Load `model` (a short name, a hub's name, or the path of a .gguf file), fetched first if it is not here.
        `settings` are those of `pelton.config`. `in_process`: the engine runs in a thread of this process."""
        self._model = model
        self._settings = config.load(**settings)
        self._pool = Pool(self._settings, in_process=in_process)
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"pelton {model}", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._pid, self._pool, self._loop, self._thread)
        try:
            with Display(sys.stderr.isatty()) as display:
                self._service: Service = self._run(self._pool.load(model, display))
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        json_schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        use_tqdm: bool = True,
    ) -> list[Result]:
        """Continue a prompt or a batch of prompts, each text or token ids; one `Result` for each, in their order.

        Text is plain text: control tokens in it stay text. Without `sampling_params` the parameters hold that the
        model's name brings along. `SamplingParams.stop` may be one string. `json_schema`,
        `regex`, `choice` or `grammar` (Lark or GBNF): what each answer must be. `use_tqdm`: show the batch's progress
        where standard error is a terminal. An error of any prompt (`InvalidRequest`) is raised and ends the batch.
        """
        shared = {"grammar": _grammar(json_schema, regex, choice, grammar)}
        fields = [{**_prompt(each), **shared} for each in _batch(prompts)]
        return self._answer(fields, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        json_schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice | Literal["none", "auto", "required"] = "auto",
        parallel_tool_calls: bool = True,
        thinking: bool | None = None,
        reasoning_effort: str | None = None,
        reasoning_budget: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Result]:
        """Answer a conversation or a batch of them; one `Result` for each. Messages are as in OpenAI's API.
        `json_schema`, `regex`, `choice` or `grammar` (Lark or GBNF): what each answer must be. `tools`: `Tool`s, or
        tools as in OpenAI's API; the calls of an answer are `Result.tool_calls`. `thinking`, `reasoning_effort`,
        `reasoning_budget`: as in `Request`.
        """
        is_one = bool(messages) and isinstance(messages[0], Message | Mapping)
        batch = cast("Sequence[Conversation]", [messages] if is_one else messages)
        common = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tuple(map(_tool, tools or ())),
            "tool_choice": tool_choice if isinstance(tool_choice, ToolChoice) else ToolChoice(mode=tool_choice),
            "parallel_tool_calls": parallel_tool_calls,
            "thinking": thinking,
            "reasoning_effort": reasoning_effort,
            "reasoning_budget": reasoning_budget,
            "template_kwargs": dict(chat_template_kwargs or {}),
            "grammar": _grammar(json_schema, regex, choice, grammar),
        }
        fields = [{"messages": tuple(map(_message, each)), **common} for each in batch]
        return self._answer(fields, sampling_params, use_tqdm)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> npt.NDArray[np.float32]:
        """The vectors [N, width] of a text or a batch of texts, each text or token ids, in their order; of one text
        [1, width]. `pooling`: how the hidden states of a text become one vector, where the model's file does not say;
        None: as the settings say. `dimensions`: keep so many of the first values. `normalize`: to a Euclidean length
        of 1. An error of any text (`InvalidRequest`) is raised and ends the batch."""
        given = {"pooling": pooling, "dimensions": dimensions, "is_normalized": normalize}
        params = _converted(given, EmbeddingParams, "embed")
        requests = self._requests([{**_prompt(each), "embedding": params} for each in _batch(texts)], None)
        vectors = self._run_all(requests, _vector, use_tqdm)
        import numpy as np  # not at the top: a program that only generates has no use for it

        return np.frombuffer(b"".join(vectors), "<f4").reshape(len(vectors), -1) if vectors else np.empty((0, 0), "<f4")

    def close(self) -> None:
        """End the engine and give its memory back. May be called twice. What is not closed is closed when nothing
        refers to it any more, or when the program ends."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the event loop's thread. Whatever interrupts the wait (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _answer(
        self,
        fields: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        shows_progress: bool,
    ) -> list[Result]:
        return self._run_all(self._requests(fields, sampling), _fold, shows_progress)

    def _requests(
        self, fields: Sequence[Mapping[str, Any]], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        # What was not given is the model's to say; what was given is all of it.
        is_open = SamplingParams.__struct_fields__ if sampling is None else ()
        if sampling is None or isinstance(sampling, SamplingParams):
            each = [_checked(sampling or SamplingParams())] * len(fields)
        else:
            each = [_checked(params) for params in sampling]
        if len(each) != len(fields):
            raise InvalidRequest(f"{len(fields)} prompts, but {len(each)} sampling_params", param="sampling_params")
        return [
            Request(id=f"llm-{secrets.token_hex(8)}", model=self._model, sampling=params, left_open=is_open, **given)
            for params, given in zip(each, fields, strict=True)
        ]

    def _run_all(self, requests: Sequence[Request], fold: Fold[T], shows_progress: bool) -> list[T]:
        """Each request's answer, folded. `fold` gives it with its usage."""
        if not self._end.alive:
            raise Unavailable("this LLM has been closed")
        if os.getpid() != self._pid:  # a fork has no threads: it would wait for ever
            raise Unavailable("this LLM belongs to the process that this one was forked from: make one after the fork")
        with Display(shows_progress and len(requests) > 1 and sys.stderr.isatty()) as display:
            return self._run(self._answer_all(requests, fold, display))

    async def _answer_all(self, requests: Sequence[Request], fold: Fold[T], display: Display) -> list[T]:
        """As many at once as keep the engine busy and its queue open."""
        num_running = self._service.engine.info.max_sequences
        slots = asyncio.Semaphore(max(1, min(num_running + 16, self._settings.engine.max_queue)))
        tick = display.counter(len(requests))

        async def answer(request: Request) -> T:
            async with slots, aclosing(await self._service.generate(request)) as events:
                result, usage = await fold(request, events)
            tick(usage.completion_tokens)
            return result

        return await all_of(answer(request) for request in requests)


def _end(pid: int, pool: Pool, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Close the pool, then the event loop and its thread."""
    if os.getpid() != pid:  # a fork has neither
        return
    closing = asyncio.run_coroutine_threadsafe(_close(pool), loop)
    closing.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    if threading.current_thread() is not thread:  # it is, where that thread was the one to find the garbage
        thread.join()
        loop.close()


async def _close(pool: Pool) -> None:
    """Close the pool, and let calls under way in other threads hear of it."""
    await pool.close()
    if calls := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(calls, timeout=1.0)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls, timeout=1.0)


async def _fold(request: Request, events: AsyncIterator[TextEvent]) -> tuple[Result, Usage]:
    choices = [Choice() for _ in range(request.sampling.n)]
    usage = Usage()
    prompt_logprobs: tuple[TokenText | None, ...] | None = None
    async for event in events:
        match event:
            case TextPrompt():
                prompt_logprobs = (None, *event.tokens)
            case TextDone():
                usage = event.usage
            case _:
                choices[event.choice].add(event)
    wants_logprobs = request.sampling.logprobs is not None
    outputs = tuple(_output(i, choice, wants_logprobs) for i, choice in enumerate(choices))
    return Result(outputs=outputs, usage=usage, prompt_logprobs=prompt_logprobs), usage


async def _vector(request: Request, events: AsyncIterator[TextEvent]) -> tuple[bytes, Usage]:
    embedded = await embedded_of(events)
    return embedded.vector, embedded.usage


def _batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt as a batch of one."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    return cast("Sequence[Prompt]", [prompts] if is_one else prompts)


def _output(index: int, choice: Choice, wants_logprobs: bool) -> Output:
    finish = choice.ended()
    return Output(
        index=index,
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=finish.reason,
        stop=finish.stop,
        logprobs=tuple(choice.tokens) if wants_logprobs else None,
        reasoning=choice.reasoning,
        tool_calls=choice.tool_calls,
        warnings=finish.warnings,
    )


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    try:
        return {"prompt_ids": tuple(map(operator.index, prompt))}  # NumPy's integers too
    except TypeError:
        raise InvalidRequest("a prompt must be a text or a sequence of token ids", param="prompt") from None


def _grammar(
    json_schema: Mapping[str, Any] | None, regex: str | None, choice: Sequence[str] | None, grammar: str | None
) -> Grammar | None:
    return structured.one_of(
        [
            None if json_schema is None else structured.json_schema(json_schema, "json_schema"),
            None if regex is None else structured.regex(regex, "regex"),
            None if choice is None else structured.choice(choice, "choice"),
            None if grammar is None else structured.grammar(grammar, "grammar"),
        ]
    )


def _tool(tool: Tool | Mapping[str, Any]) -> Tool:
    if isinstance(tool, Tool):
        return tool
    try:
        return msgspec.convert(dict(tool)["function"], Tool)
    except (KeyError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"a tool is wrong: {error}", param="tools") from None


def _message(message: Message | Mapping[str, Any]) -> Message:
    fields = msgspec.structs.asdict(message) if isinstance(message, Message) else message
    try:
        return msgspec.convert(fields, Message)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"a message is wrong: {error}", param="messages") from None


def _checked(params: Any) -> SamplingParams:
    """The parameters, each of the type that its field promises: Python checks none. A lone stop string would
    otherwise be taken for as many as it has letters."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"sampling_params has a {type(params).__name__}", param="sampling_params")
    fields = msgspec.structs.asdict(params)
    if isinstance(fields["stop"], str):
        fields["stop"] = (fields["stop"],)
    return _converted(fields, SamplingParams, "sampling_params")


def _converted(fields: Mapping[str, Any], kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}", param=where) from None
