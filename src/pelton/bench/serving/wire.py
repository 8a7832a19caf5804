"""The two endpoints of OpenAI's API, as far as a benchmark asks and reads them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Card(msgspec.Struct):
    """One entry of /v1/models; `weight_bytes` is Pelton's."""

    id: str
    weight_bytes: int | None = None


class Models(msgspec.Struct):
    """GET /v1/models."""

    data: list[Card]


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """`usage`; the details are left out by many servers."""

    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def piece(self) -> str | None:
        return self.text if self.delta is None else self.delta.content or self.delta.reasoning_content


class Answer(msgspec.Struct):
    """A whole answer, or a chunk of one."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


@dataclass(frozen=True)
class Prompt:
    """A text of a user, and one of a system before it."""

    text: str
    system: str | None = None


def body(
    model: str, endpoint: Endpoint, prompt: Prompt, max_tokens: int, *, is_stream: bool, needs_minimum: bool = False
) -> bytes:
    """A greedy request whose answer does not end before its length. `ignore_eos` is what most servers call that;
    `needs_minimum` says it with `min_tokens`, too."""
    fields: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    if endpoint == "chat":
        system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        fields["messages"] = [*system, {"role": "user", "content": prompt.text}]
    else:
        fields["prompt"] = prompt.text if prompt.system is None else f"{prompt.system} {prompt.text}"
    if needs_minimum:
        fields["min_tokens"] = max_tokens
    if is_stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(fields)


_decode = msgspec.json.Decoder(Answer).decode


@dataclass
class Reader:
    """Reads a stream of chunks as it comes in. Times are of time.perf_counter."""

    first: float | None = None
    """When the first text was here."""
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str = ""
    _rest: bytes = b""

    def receive(self, status: int, data: bytes) -> None:
        """Take the next bytes of an answer."""
        if status != 200:
            self._rest += data
            self.error = f"{status}: {self._rest[:200].decode(errors='replace')}"
            return
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (event := line[5:].strip()).startswith(b"{"):
                self._chunk(event, now)

    def _chunk(self, line: bytes, now: float) -> None:
        try:
            chunk = _decode(line)
        except msgspec.MsgspecError as error:
            self.error = f"a chunk that is none of OpenAI's API: {error}"
            return
        if chunk.error is not None:
            self.error = _message(chunk.error)
        if chunk.usage is not None:
            self.usage = chunk.usage
        if not chunk.choices:
            return
        self.finish_reason = chunk.choices[0].finish_reason or self.finish_reason
        if chunk.choices[0].piece:
            if self.first is None:
                self.first = now
            else:
                self.gaps.append(now - self.last)
            self.last = now


def _message(error: Any) -> str:
    return str(error["message"] if isinstance(error, dict) and error.get("message") else error)
