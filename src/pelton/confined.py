"""Work that could take all time and memory, in a child process which the system ends at its limits.

Some libraries bound most of what they do for hostile input, but not all, and a call into compiled code cannot be
ended from outside. So it runs in a child (a fresh `python -m`, never forked) that sets its own limits: they hold also
when this process is gone. The child takes one message after the other on standard input and answers each; it ends with
this process, and is started again when it is needed.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Literal, NamedTuple

from pelton.errors import InternalError, Unavailable

_LENGTH_BYTES = 4
STACK_BYTES = 4 << 20
"""Of the child."""
_ENDINGS: dict[int, Literal["time", "memory"]] = {
    -signal.SIGPROF: "time",
    -signal.SIGABRT: "memory",
    -signal.SIGSEGV: "memory",  # of the stack
}
"""How the child ends over its limits."""


class Limits(NamedTuple):
    """What the child may take."""

    cpu_seconds: float
    """For one message."""
    memory_bytes: int
    """Of address space, for all."""


class OverLimit(Exception):
    """A message took more than it may."""

    def __init__(self, what: Literal["time", "memory"]) -> None:
        super().__init__(what)
        self.what = what


class Confined:
    """The child. Any thread may ask; one message is worked on at a time."""

    def __init__(self, module: str, limits: Limits) -> None:
        """`module`: what the child runs; it calls `serve`."""
        self._module = module
        self._limits = limits
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        """Of the child's pipes."""

    def start(self) -> None:
        """Start the child, if it does not run, without waiting for it. Raises `Unavailable` where it cannot be."""
        with self._lock:
            self._running()

    def ask(self, message: bytes) -> bytes:
        """The child's answer. Blocks until it is there. Raises `OverLimit`, `Unavailable` where the child cannot be
        started, and `InternalError` where it ended for another reason."""
        with self._lock:
            child = self._running()
            try:
                answer = _exchange(child, message)
            except BaseException:  # no memory for the answer, say: its rest must not answer the next message
                child.kill()
                _end(child)
                self._child = None
                raise
            if answer is not None:
                return answer
            status, self._child = _end(child), None
        if status in _ENDINGS:
            raise OverLimit(_ENDINGS[status])
        raise InternalError(f"the process of {self._module} ended with exit status {status}")

    def close(self) -> None:
        """End the child; what it works on fails. From any thread."""
        self._is_closed = True
        if (child := self._child) is not None:
            child.kill()
        with self._lock:
            if self._child is not None:
                self._child.kill()
                _end(self._child)
                self._child = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise InternalError(f"the process of {self._module} was closed")
        if self._child is not None and self._child.poll() is not None:  # by others, while it had nothing to do
            _end(self._child)
            self._child = None
        if self._child is None:
            self._child = _start([sys.executable, "-P", "-m", self._module, *map(str, self._limits)])
        return self._child


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a terminal is the caller's matter
        )
    except OSError as error:  # the system has no process, file descriptor or memory left
        raise Unavailable(f"a process that the request needs cannot be started: {error}") from None


def _exchange(child: subprocess.Popen[bytes], message: bytes) -> bytes | None:
    """None: the child has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    data = memoryview(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
    with suppress(OSError):  # so says its output, too
        while data:
            data = data[child.stdin.write(data) :]
    return _read(child.stdout)


def _read(source: IO[bytes]) -> bytes | None:
    """The next message; None: there is none."""
    length = _exactly(source, _LENGTH_BYTES)
    return None if length is None else _exactly(source, int.from_bytes(length, "little"))


def _exactly(source: IO[bytes], count: int) -> bytes | None:
    pieces: list[bytes] = []
    while count:
        if not (piece := source.read(count)):
            return None
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _end(child: subprocess.Popen[bytes]) -> int:
    """The exit status of a child that ends."""
    with child:  # which closes the pipes
        return child.wait()


def serve(answer: Callable[[bytes], bytes]) -> None:
    """The child: answer what comes on standard input, for as long as something comes. The system ends the process when
    `answer` takes too much."""
    limits = Limits(float(sys.argv[1]), int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    # Service managers send it to all of a service's processes; the one that asks may have something to finish.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            if (message := _read(source)) is None:
                return
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)  # whose signal ends the process
            answered = answer(message)
            signal.setitimer(signal.ITIMER_PROF, 0)
            sink.write(len(answered).to_bytes(_LENGTH_BYTES, "little") + answered)
            sink.flush()
        except MemoryError:
            os.abort()  # as compiled code does
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # compiled code that found no memory
                os.abort()
            raise
