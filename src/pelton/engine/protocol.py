"""The typed messages between an engine process and its client: msgpack over a pair of sockets, one message per step,
each behind its length."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import msgspec

from pelton.config import EngineConfig
from pelton.formats.bounded_folder import BoundedFolder
from pelton.formats.digest import FileDigest, ModelFile
from pelton.request import EngineRequest, Event, TokenEvent


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message to an engine process: what to load."""

    model_path: str
    config: EngineConfig
    known: tuple[FileDigest, ...] = ()
    """Digests of the models' files, where they are known. Those of other states of a file are not used."""
    packed: BoundedFolder | None = None
    """Where packed weights are kept; None: nowhere."""
    prefixes: BoundedFolder | None = None
    """Where cached prefixes are kept; None: nowhere."""
    files: tuple[ModelFile, ...] | None = None
    """Those of an earlier life of the engine: others are refused."""
    is_shared: bool = False
    """Is memory left to other models, unless the settings want all of it?"""
    draft_path: str | None = None
    """The draft model's file; None: there is none."""


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """The answer to `Needs`: load, and take no more than so many bytes."""

    memory: int


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """What grammars are made of; comes before the first request with one.

    `tokens`: the bytes of each token; `control_ids`: those that are no text; `end_ids`: those that end a turn.
    """

    tokens: list[bytes]
    control_ids: list[int]
    end_ids: list[int]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request, or one of its choices, with finish reason "abort". Unknown ids are ignored."""

    request_id: str
    choice: int | None = None


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """Pin a prompt no longer. Unknown ids are ignored."""

    request_id: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process. Requests in flight are not waited for."""


LENGTH_BYTES = 4


def framed(body: bytes) -> bytes:
    """A message's bytes behind their number."""
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


ToEngine = Start | Grant | Vocabulary | EngineRequest | Abort | Unpin | Stop


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded engine is. Memory is in bytes, as planned before the load."""

    vocab_size: int
    context: int
    """Tokens that a sequence may hold, prompt and output together."""
    width: int
    """Values of a hidden state, and so of an embedding."""
    files: tuple[ModelFile, ...]
    """The model's, as they were opened."""
    fingerprint: str | None
    """The numerics fingerprint: equal fingerprints give equal bits. None until the files' digests are known."""
    max_sequences: int
    kv_tokens: int
    """Tokens that the KV memory holds over all sequences."""
    draft_context: int = 0
    """Tokens of a sequence that the draft model can follow; 0: there is no draft model. Bytes are with its own."""
    weight_bytes: int
    kv_bytes: int
    arena_bytes: int


class PinInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that stays in KV memory. Times are seconds since 1970."""

    id: str
    """Of the request that asked for it."""
    num_tokens: int
    """Those of its prompt that are pinned: the ones that fill blocks."""
    created_at: float
    expires_at: float


class Counters(msgspec.Struct, kw_only=True):
    """How much the engine has done since it started, and what it holds now."""

    steps: int = 0
    requests: int = 0
    aborted: int = 0
    preempted: int = 0
    swapped: int = 0
    """Of those preempted, sequences that were copied to host memory."""
    drafted: int = 0
    """Tokens that were tried out as drafts."""
    accepted: int = 0
    """Of those, the ones that the model drew itself."""
    drafted_by_model: int = 0
    """Of those that were tried out, the ones that the draft model drew."""
    accepted_by_model: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests that ended, those from the cache included."""
    cached_tokens: int = 0
    disk_bytes_read: int = 0
    """Of cached prefixes."""
    disk_bytes_written: int = 0
    completion_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    pins: tuple[PinInfo, ...] = ()


class Needs(msgspec.Struct, frozen=True, tag="needs"):
    """The model is opened and its memory is planned, in bytes: what it must have at least, and what it needs for the
    usual context. Nothing big is allocated before the `Grant`."""

    least: int
    usual: int


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """What will be taken of the `Grant`, in bytes."""

    memory: int


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The share of the model that is loaded, 0 to 1."""

    share: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded; requests are served from now on."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The model could not be loaded; the process ends. `kind` is the name of the error's class in `errors`."""

    kind: str
    message: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """A sign of life, also while the model is loaded and in the middle of a step."""


class Identified(msgspec.Struct, frozen=True, tag="identified"):
    """The digests of a model's files have been taken. Comes at most once for each, and not where they were known."""

    files: tuple[FileDigest, ...]
    fingerprint: str | None
    """The numerics fingerprint; None: the files are the draft model's, which it does not depend on."""


Stream = tuple[str, int]
"""A request's id and the number of one of its choices."""


class Streams(msgspec.Struct, frozen=True, array_like=True, tag="streams"):
    """Whose the following `Tokens` are, until this comes again."""

    streams: tuple[Stream, ...]


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """A token for each of the last `Streams`, of which there is no more to be told: as many `TokenEvent`s."""

    token_ids: bytes
    """As int32 in this machine's order: an object for each would take longer than all else in a step."""


StepEvent = Event | Streams | Tokens
"""What an engine tells."""


class Unfold:
    """One engine's events, as its client hands them out."""

    def __init__(self) -> None:
        self._streams: tuple[Stream, ...] = ()

    def __call__(self, events: Iterable[StepEvent]) -> Iterator[Event]:
        """Those of the next step."""
        for event in events:
            match event:
                case Streams(streams=streams):
                    self._streams = streams
                case Tokens(token_ids=ids):
                    for (request_id, choice), id in zip(self._streams, array("i", ids), strict=True):
                        yield TokenEvent(request_id, choice, id)
                case _:
                    yield event


class Events(msgspec.Struct, frozen=True, tag="events", omit_defaults=True):
    """All events of one step, in order; none of them where only the counters are told."""

    events: list[StepEvent]
    counters: Counters | None = None
    """None: they are told again soon. Where a choice or a request begins or ends, they are not put off."""


FromEngine = Needs | Planned | Progress | Ready | Failed | Alive | Identified | Events
