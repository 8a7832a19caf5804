"""The engine as a process of its own: `python -m pelton.engine.process DESCRIPTOR`.

It inherits one of a pair of sockets, is told there what to load, and serves until it is told to stop or its peer is
gone: its standard input is a pipe that the client holds open for as long as it lives.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from pelton import logs
from pelton.engine.protocol import (
    LENGTH_BYTES,
    Abort,
    Alive,
    Events,
    Failed,
    FromEngine,
    Grant,
    Planned,
    Progress,
    Ready,
    Start,
    Stop,
    ToEngine,
    Unpin,
    Vocabulary,
    framed,
)
from pelton.errors import PeltonError
from pelton.request import EngineRequest

if TYPE_CHECKING:
    from pelton.engine.engine import Engine

log = logging.getLogger(__name__)

HEARTBEAT = 1000
"""Milliseconds between signs of life."""


class Peer:
    """The client at the other end of the socket, whose file descriptor is ours. A thread of its own reads what comes,
    gives signs of life, and sends what the socket had no room for, so that the engine's thread looks at a queue."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._lock = threading.Lock()
        """Of what is unsent, and of sending."""
        self._is_open = True
        self._unsent = bytearray()
        """What the socket's buffer had no room for."""
        self._received = bytearray()
        self._messages: SimpleQueue[ToEngine | None] = SimpleQueue()
        """None: `receive` is to return."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._bell, self._rope = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="client's socket", daemon=True)
        self._thread.start()

    def send(self, message: FromEngine) -> None:
        """Queue a message; never blocks."""
        data = framed(self._encoder.encode(message))
        with self._lock:
            self._send(data)

    def _send(self, data: bytes) -> None:
        if not self._unsent:
            data = data[self._try_to_send(data) :]
            if not data:
                return
            self._rope.send(b"!")
        self._unsent += data

    def _try_to_send(self, data: bytes | bytearray) -> int:
        """How many bytes are off."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0  # the client reads slowly
        except OSError:
            return len(data)  # it is gone, and this process with it as soon as that is noticed

    def receive(self, timeout: int | None) -> ToEngine | None:
        """The next message; None if none comes within so many milliseconds (None: however long it takes), or when
        woken."""
        if timeout == 0 and self._messages.empty():
            return None
        with suppress(Empty):
            return self._messages.get(timeout=None if timeout is None else timeout / 1000)
        return None

    def wake(self) -> None:
        """Let `receive` return. From any thread."""
        self._messages.put(None)

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            self._messages.put(Stop())

    def _watch(self) -> None:
        """Until the client is gone, or nobody listens to it any more."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        alive = framed(msgspec.msgpack.encode(Alive()))
        next_beat = time.monotonic() + HEARTBEAT / 1000
        while self._is_open:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            events = dict(poll.poll(max(0.0, 1000 * (next_beat - time.monotonic()))))
            with self._lock:
                if self._unsent:
                    del self._unsent[: self._try_to_send(self._unsent)]
                if time.monotonic() >= next_beat:
                    next_beat += HEARTBEAT / 1000
                    self._send(alive)
            if self._bell.fileno() in events:
                self._bell.recv(4096)
            if events.get(self._socket.fileno(), 0) & ~select.POLLOUT and not self._read():
                return

    def _read(self) -> bool:
        """Take what has come; False: the client is gone."""
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            return False
        self._received += data
        while (end := LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "little")) <= len(self._received):
            self._messages.put(self._decoder.decode(self._received[LENGTH_BYTES:end]))
            del self._received[:end]
        return bool(data)

    def close(self) -> None:
        """Send what is queued and hang up."""
        self._is_open = False
        self._rope.send(b"!")
        self._thread.join()
        self._socket.settimeout(1)
        with suppress(OSError):
            self._socket.sendall(self._unsent)
        for each in (self._socket, self._bell, self._rope):
            each.close()


def serve(engine: Engine, peer: Peer) -> None:
    """Step while there is work, sleep on the socket while there is none, until told to stop."""
    is_checked = True
    while True:
        has_work = engine.has_work
        message = peer.receive(0 if has_work else math.ceil(min(HEARTBEAT, 1000 * engine.seconds_idle)))
        while message is not None:
            has_work = False  # or so it may be now
            match message:
                case EngineRequest():
                    engine.submit(message)
                case Vocabulary():
                    engine.learn(message)
                case Abort(request_id=request_id, choice=choice):
                    engine.abort(request_id, choice)
                case Unpin(request_id=request_id):
                    engine.unpin(request_id)
                case _:
                    return
            message = peer.receive(0)
        if has_work or engine.has_work:
            peer.send(engine.message(engine.advance()))
            is_checked = False
        else:
            peer.send(Events([], engine.counters))
            if not is_checked:
                engine.check()
                is_checked = True
        if identified := engine.take_identified():
            peer.send(identified)


def _watch_peer() -> None:
    """End with the peer, even in the middle of a step."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def main(descriptor: int) -> int:
    """Load and serve. The exit status is 0 only where the client asked to stop."""
    # Service managers send it to all of a service's processes; this one's end is its client's matter, which may drain.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.setup("text", logging.WARNING)
    threading.Thread(target=_watch_peer, name="watch peer", daemon=True).start()
    peer = Peer(descriptor)
    # All that loading needs, before it is known what is to be loaded.
    from pelton.backends import base as backends
    from pelton.engine.engine import load_prepared
    from pelton.engine.prepare import BACKEND, Prepared

    backends.module(BACKEND)
    start = peer.receive(None)
    if not isinstance(start, Start):
        return 0
    logs.setup(start.config.log_format, logging.WARNING)
    try:
        prepared = Prepared(start)
        peer.send(prepared.needs)
        grant = peer.receive(None)
        if not isinstance(grant, Grant):
            return 0
        plan = prepared.plan(grant.memory)
        peer.send(Planned(plan.total))
        engine = load_prepared(prepared, plan, lambda share: peer.send(Progress(share)))
    except Exception as error:
        if isinstance(error, PeltonError):
            peer.send(Failed(type(error).__name__, str(error)))
        else:
            log.error("loading failed", exc_info=error)
            peer.send(Failed("InternalError", f"loading failed: {type(error).__name__}: {error}"))
        peer.close()
        return 1
    peer.send(Ready(engine.info))
    engine.start_background(peer.wake)
    serve(engine, peer)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
