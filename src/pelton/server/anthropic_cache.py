"""`cache_control`: what of a prompt is to be kept, how much of it that is, and keeping it.

All prompts are cached, as long as there is room. What a request marks is pinned beside that, for the time that it says,
once its answer is out. Where there is no room for a pin the request does not fail: what it marked is cached like any.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from pelton.errors import InvalidRequest, PeltonError
from pelton.request import Request, Usage
from pelton.server import anthropic_types as wire
from pelton.server.anthropic_prompt import prompt
from pelton.server.context import current

if TYPE_CHECKING:
    from pelton.prompting import EncodedPrompt
    from pelton.service import Service

log = logging.getLogger("pelton.server")

TTL = Literal["5m", "1h"]
SECONDS: dict[TTL, float] = {"5m": 300.0, "1h": 3600.0}
FRESH = 0.9
"""A pin with so much of its time left is not renewed."""
KEYS_PART = 8
"""Of KV memory a key that is for inference alone may have this part pinned."""
PIN_SECONDS = 60.0
"""How long a pin may take, its turn's wait included."""
_ANYTHING = wire.MessageParam(role="user", content=".")
"""Stands for the chat where all of it comes behind what is kept: templates want a user's turn."""

Position = tuple[float, ...]
"""Of a block: its list (tools, system, messages), and where it stands there. Tuples compare as blocks follow."""


@dataclass(frozen=True)
class Kept:
    """What of a prompt is to be kept: by time to live, the number of its first tokens."""

    prompt: EncodedPrompt | None = None
    """The whole of it."""
    lengths: dict[TTL, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def ids(self) -> Sequence[int]:
        """Of the whole prompt."""
        return () if self.prompt is None else self.prompt.ids

    def created(self, usage: Usage) -> wire.CacheCreation:
        """How many tokens were not cached before and are to be kept now, each counted once."""
        read = usage.cached_tokens
        hour = max(read, self.lengths.get("1h", 0))
        return wire.CacheCreation(
            ephemeral_1h_input_tokens=hour - read,
            ephemeral_5m_input_tokens=max(0, self.lengths.get("5m", 0) - hour),
        )


async def kept(service: Service, body: wire.CountRequest, request: Request) -> Kept:
    """What of a request's prompt is to be kept. Raises what is wrong with the prompt."""
    whole = await service.prepare(request)
    lengths: dict[TTL, int] = {}
    warnings = []
    for ttl, prefix in marked(body).items():
        try:
            lengths[ttl] = _num_shared(whole.ids, await service.encode(prompt(prefix, is_whole=False)))
        except InvalidRequest as error:  # a template that wants a whole chat
            warnings.append(f"cache_control: this model's chat template cannot show a part of the chat: {error}")
    return Kept(whole, lengths, tuple(warnings))


def marked(body: wire.CountRequest) -> dict[TTL, wire.CountRequest]:
    """For each time to live that a request names, the request up to the last block that is marked so."""
    last: dict[TTL, Position] = {}
    for control, position in _blocks(body):
        if control is not None:
            last[control.ttl] = position
    if last.get("1h", ()) >= last.get("5m", ()):  # what is kept for an hour is kept for five minutes
        last.pop("5m", None)
    return {ttl: _up_to(body, position) for ttl, position in last.items()}


def _blocks(body: wire.CountRequest) -> Iterator[tuple[wire.CacheControl | None, Position]]:
    """All blocks of a prompt in their order, with how they are marked."""
    for i, tool in enumerate(body.tools or ()):
        yield tool.cache_control, (0, i)
    for i, text in enumerate(body.system if isinstance(body.system, list) else ()):
        yield text.cache_control, (1, i)
    for m, message in enumerate(body.messages):
        for i, block in enumerate(message.content if isinstance(message.content, list) else ()):
            yield block.cache_control, (2, m, i)
            inner = block.content if isinstance(block, wire.ToolResultBlock) else None
            for each in inner if isinstance(inner, list) else ():
                yield each.cache_control, (2, m, i)
    yield body.cache_control, (2, len(body.messages) - 1, math.inf)


def _up_to(body: wire.CountRequest, position: Position) -> wire.CountRequest:
    kind, *at = position
    if kind == 0:  # Templates put tools behind the system's text or before it: only both together are a beginning.
        return msgspec.structs.replace(body, messages=[_ANYTHING])
    if kind == 1:
        assert isinstance(body.system, list)
        return msgspec.structs.replace(body, system=body.system[: int(at[0]) + 1], messages=[_ANYTHING])
    *before, last = body.messages[: int(at[0]) + 1]
    if isinstance(last.content, list) and at[1] < len(last.content):
        last = msgspec.structs.replace(last, content=last.content[: int(at[1]) + 1])
    return msgspec.structs.replace(body, messages=[*before, last])


def _num_shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    return next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))


@dataclass(eq=False)
class _Pin:
    id: str
    service: weakref.ref[Service]
    key_id: str
    salt: str
    ids: tuple[int, ...]
    until: float
    is_pending: bool = True


class Keeper:
    """Pins what requests mark. A prefix that is pinned already is not pinned again until a tenth of its time is over;
    one that goes on where an older one of the same key ends takes its place, once it is pinned itself. A key that may
    not pin otherwise has no more than its share; all together have what the engine gives pins."""

    def __init__(self) -> None:
        self._pins: list[_Pin] = []

    async def keep(self, service: Service, what: Kept, salt: str) -> None:
        """Pin what a request has marked, as far as there is room."""
        for ttl, length in what.lengths.items():
            if length:
                await self._keep(service, tuple(what.ids[:length]), salt, SECONDS[ttl])

    async def _keep(self, service: Service, ids: tuple[int, ...], salt: str, seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        known = {pin.id for pin in service.pins}
        self._pins = [pin for pin in self._pins if pin.until > now and pin.service() is not None]
        key = current().key
        held = [
            pin
            for pin in self._pins
            if pin.service() is service and pin.key_id == key.id and (pin.is_pending or pin.id in known)
        ]
        ours = [pin for pin in held if pin.salt == salt]
        if any(pin.until >= now + FRESH * seconds and pin.ids[: len(ids)] == ids for pin in ours):
            return
        replaced = [
            pin for pin in ours if pin.ids == ids[: len(pin.ids)] and pin.until <= now + seconds and not pin.is_pending
        ]
        num_held = sum(len(pin.ids) for pin in held if pin not in replaced)
        share = service.engine.info.kv_tokens // KEYS_PART
        if num_held + len(ids) > share and not key.may("models"):
            told = "a prompt's prefix of %d tokens was not pinned: the key %r may pin %d, of which %d are taken"
            log.info(told, len(ids), key.name, share, num_held)
            return
        new = _Pin(f"pin-{secrets.token_hex(12)}", weakref.ref(service), key.id, salt, ids, now + seconds)
        self._pins.append(new)
        try:
            async with asyncio.timeout(PIN_SECONDS):
                await service.pin(Request(id=new.id, model="", prompt_ids=ids, cache_salt=salt), seconds)
            new.is_pending = False
            for pin in replaced:
                if pin in self._pins:  # not gone meanwhile
                    service.unpin(pin.id)
                    self._pins.remove(pin)
        except (PeltonError, TimeoutError) as error:
            log.info("a prompt's prefix of %d tokens was not pinned: %s", len(ids), error)
        finally:
            if new.is_pending:
                self._pins.remove(new)
