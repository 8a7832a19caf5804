"""An engine that says what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pelton.config import EngineConfig
from pelton.engine.link import Opening
from pelton.engine.protocol import EngineInfo, Needs
from pelton.formats.digest import FileStamp, ModelFile
from pelton.pool import loading
from pelton.request import Accepted, Done, EngineRequest, ErrorEvent, Event, Finish, Logprob, TokenEvent, Usage

Script = Callable[[EngineRequest], list[Event]]


def info(*, vocab_size: int = 10**6, context: int = 1000, files: tuple[ModelFile, ...] = ()) -> EngineInfo:
    return EngineInfo(
        vocab_size=vocab_size,
        context=context,
        width=4,
        files=files,
        fingerprint="scripted",
        max_sequences=8,
        kv_tokens=10_000,
        weight_bytes=4000,
        kv_bytes=0,
        arena_bytes=0,
    )


@dataclass
class ScriptedEngine:
    """Sends the events of `script` after the acceptance, then `Done`; or `refusal` at once."""

    script: Script
    info: EngineInfo = field(default_factory=info)
    refusal: ErrorEvent | None = None
    hangs: bool = False
    requests: list[EngineRequest] = field(default_factory=list)
    aborts: list[tuple[str, int | None]] = field(default_factory=list)
    num_open: int = 0
    is_closed: bool = False
    pid: int | None = None
    trouble: Exception | None = None
    has_vocabulary: bool = True

    async def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        if self.refusal is not None:
            yield self.refusal
            return
        self.num_open += 1
        try:
            yield Accepted(request.id)
            for event in self.script(request):
                await asyncio.sleep(0)
                yield event
            if self.hangs:
                await asyncio.sleep(3600)
            yield Done(request.id, Usage(prompt_tokens=len(request.prompt_ids), completion_tokens=99, cached_tokens=1))
        finally:
            self.num_open -= 1

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self.aborts.append((request_id, choice))

    async def close(self) -> None:
        self.is_closed = True


def saying(*choices: list[int], stop_id: int | None = 2, logprobs: bool = False) -> Script:
    """Each choice says its tokens, one token of each in turn, then ends."""

    def script(request: EngineRequest) -> list[Event]:
        events: list[Event] = []
        for at in range(max(map(len, choices))):
            for number, ids in enumerate(choices):
                if at < len(ids):
                    top = (Logprob(ids[at], -0.5), Logprob(0, -2.0)) if logprobs else ()
                    events.append(TokenEvent(request.id, number, ids[at], -0.5 if logprobs else None, top))
        reason = "length" if stop_id is None else "stop"
        return events + [Finish(request.id, number, reason, stop_id) for number in range(len(choices))]

    return script


class Client(ScriptedEngine):
    """Stands in for the client of an engine process in the pool."""

    made: ClassVar[list[Client]] = []
    failures: ClassVar[list[Exception]] = []
    says: ClassVar[Script] = saying([5])
    needs: ClassVar[tuple[int, int]] = (1000, 2000)
    """Bytes that a model takes at least and usually."""
    loading: ClassVar[float] = 0.01
    """Seconds that `start` takes."""

    def __init__(self, path: Path, engine: EngineConfig, *, in_process: bool = False, **options: Any) -> None:
        files = (ModelFile(str(path), FileStamp.of(path.stat())),) if path.exists() else ()
        super().__init__(type(self).says, info(files=files))
        self.options = options
        self.arguments = (path, engine, in_process)
        self.is_loading = True
        self.made.append(self)

    async def start(self, opening: Opening) -> None:
        try:
            opening.settle(min(await opening.admit(Needs(*self.needs)), self.needs[1]), self.pid)
            opening.progress(0.5)
            await asyncio.sleep(self.loading)
        finally:
            self.is_loading = False
        if self.failures:
            raise self.failures.pop()

    @classmethod
    def stand_in(cls, monkeypatch: pytest.MonkeyPatch, says: Script | None = None) -> None:
        monkeypatch.setattr(loading, "EngineClient", cls)
        monkeypatch.setattr(cls, "made", [])
        monkeypatch.setattr(cls, "failures", [])
        monkeypatch.setattr(cls, "says", staticmethod(says or saying([5])))
