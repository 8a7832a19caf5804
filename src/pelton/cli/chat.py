"""`pelton run`: one answer, or a chat in the terminal."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from contextlib import aclosing
from typing import Any

import click

from pelton import config
from pelton.errors import PeltonError
from pelton.pool import Pool
from pelton.progress.display import Display
from pelton.request import Message, Request, SamplingParams, TextDelta, TextDone, TextFinish

HELP = """\
Enter sends; a line that ends in a backslash goes on in the next one, and \"\"\" opens and closes a longer text.
  /clear          forget the conversation
  /system TEXT    set the system message and forget the conversation
  /help           show this
  /bye            leave (so does Ctrl-D)
Ctrl-C stops the answer, not the program."""


DEFAULTS: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95}
"""Where neither the caller nor the model's name says something else."""


def run(model: str, prompt: str | None, **options: Any) -> None:
    """Load `model`, then answer `prompt` or start a chat."""
    names = ("system", "max_tokens", "temperature", "top_p", "seed", "verbose")
    own = {name: options.pop(name) for name in names}
    settings = config.load(**options)
    session = Session(model, Pool(settings), **own)
    with asyncio.Runner() as runner:
        try:
            runner.run(session.answer_once(prompt) if prompt is not None else session.chat())
        except KeyboardInterrupt:
            sys.exit(130)


class Session:
    """One conversation: its messages, its settings and the model that answers."""

    def __init__(
        self,
        model: str,
        pool: Pool,
        *,
        system: str | None,
        max_tokens: int | None,
        temperature: float | None,
        top_p: float | None,
        seed: int | None,
        verbose: bool,
    ) -> None:
        self._model = model
        self._pool = pool
        self._verbose = verbose
        given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        given = {name: value for name, value in given.items() if value is not None}
        self._sampling = SamplingParams(**DEFAULTS | given)
        self._left_open = tuple(name for name in SamplingParams.__struct_fields__ if name not in given)
        self._system = system
        self._messages: list[Message] = []
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Forget the conversation."""
        self._system = system
        self._messages = [] if system is None else [Message(role="system", content=system)]

    async def load(self) -> None:
        """Fetch and load the model, showing what happens."""
        with Display() as display:
            await self._pool.load(self._model, display)

    async def answer_once(self, prompt: str) -> None:
        """Answer one prompt on standard output."""
        try:
            await self.load()
            await self.answer(prompt)
        finally:
            await self._pool.close()

    async def chat(self) -> None:
        """Read and answer until the user leaves."""
        from pelton.cli.prompt import Prompt

        try:
            await self.load()
            click.echo(f"Chatting with {self._model}. /help shows what you can type.", err=True)
            prompt = Prompt()
            while (text := await prompt.read()) is not None:
                if text.startswith("/"):
                    if self.command(text):
                        return
                elif text:
                    await self.interruptible(text)
        finally:
            await self._pool.close()

    def command(self, line: str) -> bool:
        """Carry out a /command; True: leave."""
        name, _, rest = line.partition(" ")
        match name:
            case "/bye" | "/exit" | "/quit":
                return True
            case "/help" | "/?":
                click.echo(HELP)
            case "/clear":
                self.reset(self._system)
                click.echo("The conversation is forgotten.")
            case "/system":
                self.reset(rest.strip() or None)
                click.echo("The system message is set; the conversation starts anew.")
            case _:
                click.echo(f"There is no command {name}; /help lists them.")
        return False

    async def interruptible(self, text: str) -> None:
        """Answer one turn; Ctrl-C ends the answer, an error is shown and the chat goes on."""
        task = asyncio.ensure_future(self.answer(text))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            click.echo("\n[stopped]", err=True)
        except PeltonError as error:
            click.echo(f"\npelton: {error.message}", err=True)
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def answer(self, text: str) -> None:
        """Stream the answer to `text` and add both to the conversation, also when it is stopped half way. A question
        without any answer is forgotten: many templates refuse two questions in a row."""
        question = Message(role="user", content=text)
        request = Request(
            id=f"run-{secrets.token_hex(8)}",
            model=self._model,
            messages=(*self._messages, question),
            sampling=self._sampling,
            left_open=self._left_open,
        )
        pieces: list[str] = []
        was_thought = False
        start = time.perf_counter()
        first = 0.0
        is_whole = False
        try:
            async with self._pool.use(self._model) as service, aclosing(await service.generate(request)) as events:
                async for event in events:
                    match event:
                        case TextDelta():
                            first = first or time.perf_counter()
                            is_thought = event.kind == "reasoning"
                            if not is_thought:
                                pieces.append(event.text)
                            was_thought = self._write(event.text, is_thought, was_thought)
                        case TextFinish(reason="length"):
                            click.echo("\n[cut: the limit of tokens is reached]", err=True, nl=False)
                        case TextDone():
                            is_whole = True
                            self._report(event, start, first)
        finally:
            if pieces or is_whole:
                self._messages += [question, Message(role="assistant", content="".join(pieces))]

    @staticmethod
    def _write(text: str, is_thought: bool, was_thought: bool) -> bool:
        """Show a piece of the answer; what is thought before it is shown dim. Was this thought?"""
        if not text:
            return was_thought
        break_between = "\n\n" if was_thought and not is_thought else ""
        click.echo(break_between + (click.style(text, dim=True) if is_thought else text), nl=False)
        return is_thought

    def _report(self, done: TextDone, start: float, first: float) -> None:
        click.echo()
        if not self._verbose:
            return
        now = time.perf_counter()
        usage = done.usage
        rate = (usage.completion_tokens - 1) / (now - first) if usage.completion_tokens > 1 else 0.0
        click.echo(
            f"[prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), first token after "
            f"{first - start:.2f} s, {usage.completion_tokens} tokens at {rate:.1f} per second]",
            err=True,
        )
