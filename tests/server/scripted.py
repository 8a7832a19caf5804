"""A pool whose service says what a test tells it to, and the real HTTP server over it on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import openai
import uvicorn

from pelton.checks import check_range
from pelton.config import ServerConfig
from pelton.engine.protocol import Counters, EngineInfo, PinInfo
from pelton.errors import InvalidRequest, ModelNotFound, PeltonError
from pelton.pool import Memory, ModelCard, Pool, Preset, Resident, StoredModel
from pelton.prompting import EncodedPrompt
from pelton.request import (
    ChoiceEvent,
    Request,
    TextDelta,
    TextDone,
    TextEmbedding,
    TextEvent,
    TextFinish,
    TokenText,
    Usage,
)
from pelton.server.app import App
from pelton.server.protocol import bounded_protocol

VECTOR = array("f", (0.5, -0.5, 0.5, 0.5)).tobytes()
"""Of every text."""


def token(text: str) -> TokenText:
    likely = tuple(
        TokenText(id=i, text=t, bytes=t.encode(), logprob=p) for i, (t, p) in enumerate(((text, -0.1), ("x", -3.0)))
    )
    return TokenText(id=7, text=text, bytes=text.encode(), logprob=-0.1, top=likely)


@dataclass
class ScriptedEngine:
    counters: Counters = field(default_factory=Counters)
    info: EngineInfo = field(
        default_factory=lambda: EngineInfo(
            vocab_size=258, context=99, width=4, files=(), fingerprint=None, max_sequences=3, kv_tokens=99,
            weight_bytes=0, kv_bytes=0, arena_bytes=0,
        )
    )  # fmt: skip


class ScriptedTokenizer:
    """Bytes are tokens; 256 begins a text, 257 ends an answer."""

    bos_id = 256
    end_ids = (257,)
    controls: ClassVar = {"<s>": 256, "<end>": 257}

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else next(name for name, i in self.controls.items() if i == id).encode()

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        return b"".join(self.token_bytes(id) for id in ids if id < 256 or not skip_special).decode("utf-8", "replace")


@dataclass(eq=False)
class ScriptedService:
    """Answers every choice with `words`, then does what `then` says."""

    words: tuple[str, ...] = ("Hel", "lo", " 🦙")
    preset: Preset | None = None
    events: tuple[ChoiceEvent, ...] = ()
    """What the first choice says in place of the words, its end included."""
    refuse: PeltonError | None = None
    fail_after: int | None = None
    hang_after: int | None = None
    delay: float = 0
    """Seconds before the first word."""
    name: str = "scripted"
    fingerprint: str = "fp-test"
    context: int = 99
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    queued: float = 0.0
    prefill: float = 0.0
    requests: list[Request] = field(default_factory=list)
    pins: list[PinInfo] = field(default_factory=list)
    num_open: int = 0
    num_ended: int = 0
    pinned: list[Request] = field(default_factory=list)
    refuse_pin: PeltonError | None = None
    tokenizer: ScriptedTokenizer = field(default_factory=ScriptedTokenizer)
    vocab_size: int = 258
    context: int = 99
    path: Path = Path("/models/scripted.gguf")
    chat_template: str = "{{ messages }}"

    async def render(self, request: Request) -> str:
        return bytes(await self.encode(request)).decode("utf-8", "replace")

    async def encode_text(self, text: str, *, add_special: bool, is_marked: bool) -> list[int]:
        ids: list[int] = []
        for part in re.split("(<s>|<end>)", text):
            id = self.tokenizer.controls.get(part) if is_marked else None
            ids += part.encode("utf-8", "replace") if id is None else [id]
        return [256, *ids] if add_special and ids[:1] != [256] else ids

    async def encode_infill(
        self, prefix: str, suffix: str, begun: str = "", files: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        return list("|".join([*(f"{name}:{text}" for name, text in files), prefix, suffix, begun]).encode())

    def as_meant(self, request: Request) -> Request:
        return request if self.preset is None else self.preset.applied(request)

    async def prepare(self, request: Request) -> EncodedPrompt:
        return EncodedPrompt(await self.encode(request))

    async def encode(self, request: Request) -> list[int]:
        """A byte of the rendered chat is a token."""
        if self.refuse is not None:
            raise self.refuse
        if request.prompt_ids is not None:
            return list(request.prompt_ids)
        text = "".join(f"[{tool.name}]" for tool in request.tools if request.tool_choice.mode != "none")
        for message in request.messages or ():
            parts = message.content if isinstance(message.content, tuple) else ({"text": message.content or ""},)
            called = "".join(map(str, message.tool_calls or ()))
            text += f"<{message.role}>" + "|".join(str(part.get("text")) for part in parts) + called
        return list((text + "<assistant>" * request.add_generation_prompt).encode("utf-8", "replace"))

    async def pin(self, request: Request, ttl: float) -> None:
        check_range("ttl", ttl, 1, 10_000)
        if self.refuse_pin is not None:
            raise self.refuse_pin
        self.pinned.append(request)
        now = time.time()
        self.pins.append(
            PinInfo(id=request.id, num_tokens=len(request.prompt_ids or ()), created_at=now, expires_at=now + ttl)
        )

    def unpin(self, request_id: str) -> None:
        self.pins = [pin for pin in self.pins if pin.id != request_id]

    async def generate(self, request: Request) -> AsyncGenerator[TextEvent, None]:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.refuse is not None:
            raise self.refuse
        self.num_open += 1
        return self._events(request)

    def usage(self, request: Request) -> Usage:
        return Usage(prompt_tokens=5, completion_tokens=len(self.words) * request.sampling.n, cached_tokens=2)

    def done(self, request: Request) -> TextDone:
        return TextDone(usage=self.usage(request), queued=self.queued, prefill=self.prefill)

    async def _events(self, request: Request) -> AsyncGenerator[TextEvent, None]:
        wants = request.sampling.logprobs is not None
        try:
            await asyncio.sleep(self.delay)
            if request.embedding is not None:
                yield TextEmbedding(vector=VECTOR)
                yield TextFinish(choice=0, reason="stop")
                yield TextDone(usage=Usage(prompt_tokens=5, cached_tokens=2), queued=self.queued)
                return
            if self.events:
                for event in self.events:
                    yield event
                yield self.done(request)
                return
            for i, word in enumerate(self.words):
                if i == self.fail_after:
                    for choice in range(request.sampling.n):
                        yield TextFinish(choice=choice, reason="error")
                    raise PeltonError("the engine broke")
                if i == self.hang_after:
                    await asyncio.sleep(3600)
                for choice in range(request.sampling.n):
                    yield TextDelta(choice=choice, text=word, tokens=(token(word),) if wants else (), token_ids=(7,))
                await asyncio.sleep(0)
            for choice in range(request.sampling.n):
                yield TextFinish(choice=choice, reason="stop", stop="END")
            yield self.done(request)
            self.num_ended += 1
        finally:
            self.num_open -= 1


@dataclass
class ScriptedPool:
    service: ScriptedService
    is_closed: bool = False

    num_users: int = 0
    unloaded: list[str] = field(default_factory=list)
    kept: list[float | None] = field(default_factory=list)
    """`keep_alive` of each use."""

    @contextlib.asynccontextmanager
    async def use(
        self, name: str, *, keep_alive: float | None = None, is_idle_priority: bool = False
    ) -> AsyncIterator[ScriptedService]:
        await self.model(name)
        self.kept.append(keep_alive)
        self.num_users += 1
        try:
            yield self.service
        finally:
            self.num_users -= 1

    async def until_leaving(self, name: str) -> None:
        while name not in self.unloaded:
            await asyncio.sleep(0.01)

    async def models(self) -> list[ModelCard]:
        return [ModelCard(id="scripted", created=1, context=99, weight_bytes=1000)]

    async def model(self, name: str) -> ModelCard:
        if name not in self.names("scripted"):
            raise ModelNotFound(f"there is no model {name[:200]!r}", param="model")
        return (await self.models())[0]

    def names(self, name: str) -> tuple[str, ...]:
        return ("scripted", "alias") if name == "scripted" else (name,)

    def loaded(self) -> list[Resident]:
        return [
            Resident(
                name="scripted",
                model="scripted",
                state="ready",
                share=1.0,
                num_requests=self.num_users,
                expires_at=None,
                used_at=0.0,
            )
        ]

    def memory(self) -> Memory:
        return Memory(budget=1000, used=10)

    async def available(self) -> list[StoredModel]:
        return []

    async def details(self, name: str) -> StoredModel:
        await self.model(name)
        return StoredModel(
            name="scripted", source="a test", size=7, digest="ab", modified_at=1.0, family="llama",
            parameters=1_500_000, quantization="Q4_0", context=99, has_chat_template=True, license=None,
        )  # fmt: skip

    async def metadata(self, name: str) -> dict[str, object]:
        await self.model(name)
        return {"general.architecture": "llama"}

    async def pull(self, name: str, report: object) -> StoredModel:
        return await self.details(name)

    async def create(self, name: str, base: str, preset: Preset) -> None:
        await self.model(base)

    async def create_of_blob(self, name: str, file: str, sha256: str, preset: Preset) -> None:
        raise InvalidRequest("there is no such blob")

    async def copy(self, source: str, destination: str) -> None:
        await self.model(source)

    async def delete(self, name: str) -> None:
        await self.model(name)

    async def has_blob(self, sha256: str) -> bool:
        return False

    async def take_blob(self, sha256: str, chunks: AsyncIterator[bytes], size: int | None) -> None:
        async for _ in chunks:
            pass

    async def unload(self, name: str) -> None:
        await self.model(name)
        self.unloaded.append(name)

    def services(self) -> list[ScriptedService]:
        return [self.service]

    def give_up_loads(self) -> None:
        pass

    async def close(self) -> None:
        self.is_closed = True


def serving(service: ScriptedService, **settings: object) -> contextlib.AbstractContextManager[str]:
    """The address of a server over the service, running in a thread."""
    return serving_pool(ScriptedPool(service), **settings)  # type: ignore[arg-type]


class _PromptServer(uvicorn.Server):
    """It ends when it is told and its answers are out; uvicorn's own looks for both ten times a second, which for
    hundreds of servers is minutes."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = threading.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self.is_up.set()
        await self._stopped.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.001)
        await self.lifespan.shutdown()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)


@contextlib.contextmanager
def serving_pool(pool: Pool, **settings: object) -> Iterator[str]:
    """The address of a server over the pool, running in a thread."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = ServerConfig(**settings)  # type: ignore[arg-type]
    app = App(pool, config)
    http = bounded_protocol(config.header_timeout, config.max_headers)
    server = _PromptServer(uvicorn.Config(app.guard, http=http, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    assert server.is_up.wait(60)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        thread.join()
        listener.close()
        app.close()


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
