"""The engine as a process of its own: `python -m pelton.engine.process ADDRESS`.

It connects to its client's socket, is told what to load, and serves until it is told to stop or its peer is gone:
its standard input is a pipe that the client holds open for as long as it lives.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from pelton.engine.protocol import (
    Abort,
    Alive,
    Events,
    Failed,
    FromEngine,
    Progress,
    Ready,
    Start,
    Stop,
    ToEngine,
)
from pelton.errors import PeltonError
from pelton.request import EngineRequest

if TYPE_CHECKING:
    from pelton.engine.engine import Engine

log = logging.getLogger(__name__)

HEARTBEAT = 1000
"""Milliseconds between signs of life."""


class Peer:
    """The client at the other end of the socket. A thread of its own gives signs of life while the engine's is busy."""

    def __init__(self, address: str) -> None:
        self._lock = threading.Lock()  # a socket is one thread's at a time
        self._is_open = True
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def send(self, message: FromEngine) -> None:
        """Queue a message; never blocks."""
        data = self._encoder.encode(message)
        with self._lock:
            self._socket.send(data, zmq.NOBLOCK)

    def receive(self, timeout: int) -> Start | EngineRequest | Abort | Stop | None:
        """The next message; None if none comes within so many milliseconds."""
        with self._lock:
            data = self._socket.recv() if self._socket.poll(timeout) else None
        return None if data is None else self._decoder.decode(data)

    def _beat(self) -> None:
        alive = msgspec.msgpack.encode(Alive())
        while self._is_open:
            time.sleep(HEARTBEAT / 1000)
            if self._lock.acquire(blocking=False):  # or else the engine's thread is at the socket: that is a sign, too
                try:
                    if self._is_open:
                        self._socket.send(alive, zmq.NOBLOCK)
                finally:
                    self._lock.release()

    def close(self) -> None:
        """Send what is queued and hang up."""
        with self._lock:
            self._is_open = False
            self._socket.close()
        zmq.Context.instance().term()


def serve(engine: Engine, peer: Peer) -> None:
    """Step while there is work, sleep on the socket while there is none, until told to stop."""
    is_checked = True
    while True:
        message = peer.receive(0 if engine.has_work else HEARTBEAT)
        while message is not None:
            match message:
                case EngineRequest():
                    engine.submit(message)
                case Abort(request_id=request_id, choice=choice):
                    engine.abort(request_id, choice)
                case _:
                    return
            message = peer.receive(0)
        if engine.has_work:
            peer.send(Events(engine.advance(), engine.counters))
            is_checked = False
        else:
            peer.send(Events([], engine.counters))
            if not is_checked:
                engine.check()
                is_checked = True


def _watch_peer(address: str) -> None:
    """End with the peer, even in the middle of a step. A peer that was killed has left its socket's folder behind."""
    while os.read(0, 4096):
        pass
    socket = Path(address.removeprefix("ipc://"))
    with suppress(OSError):
        socket.unlink()
        socket.parent.rmdir()
    os._exit(1)


def main(address: str) -> int:
    """Connect, load, serve. The exit status is 0 only where the client asked to stop."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_watch_peer, args=(address,), name="watch peer", daemon=True).start()
    peer = Peer(address)
    start = peer.receive(-1)
    if not isinstance(start, Start):
        return 0
    from pelton.engine.engine import load

    try:
        engine = load(Path(start.model_path), start.config, lambda share: peer.send(Progress(share)))
    except Exception as error:
        if isinstance(error, PeltonError):
            peer.send(Failed(type(error).__name__, str(error)))
        else:
            log.error("loading failed", exc_info=error)
            peer.send(Failed("InternalError", f"loading failed: {type(error).__name__}: {error}"))
        peer.close()
        return 1
    peer.send(Ready(engine.info))
    serve(engine, peer)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
