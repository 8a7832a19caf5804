"""Whether a grammar can be compiled in bounded time and memory, found out in a process that may be killed.

`llguidance` bounds most of its work, but not how regular expressions are combined: a schema of a kilobyte whose `allOf`
has a pattern per letter of the alphabet takes hours and all memory, in a call that nothing ends. So each grammar is
first tried in a child, whose limits the system holds; what passes is compiled again here.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress

from pelton.errors import InternalError

CPU_SECONDS = 3.0
"""Of one grammar. Those that people write take milliseconds."""
MEMORY_BYTES = 4 << 30
"""Of address space, for the whole child."""
_LENGTH_BYTES = 4
_READY = b"!"
STACK_BYTES = 4 << 20
"""Of the child: half of what the engine's thread has."""
_LIMIT_SIGNALS = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV)
"""How the child ends over its time, over its memory and over its stack."""


class GrammarTrial:
    """The child, which is started when it is needed and ends with this process."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        """Of the child's pipes."""

    def ends(self, definition: str) -> bool:
        """Does compiling this, in the library's form, end within the limits? Blocks until that is known. Raises
        `InternalError` where the child could not find out."""
        with self._lock:
            if self._child is None:
                self._child = self._start()
            data = definition.encode()
            if _ask(self._child, len(data).to_bytes(_LENGTH_BYTES, "little") + data):
                return True
            status, self._child = _end(self._child), None
        if status in _LIMIT_SIGNALS:
            return False
        raise InternalError(f"the process that tries grammars ended with exit status {status}")

    def close(self) -> None:
        """End the child; a trial that runs fails. From any thread."""
        self._is_closed = True
        if (child := self._child) is not None:
            child.kill()
        with self._lock:
            if self._child is not None:
                self._child.kill()
                _end(self._child)
                self._child = None

    def _start(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise InternalError("the engine was closed")
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(self._cpu_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a terminal is the caller's matter
        )
        if not _ask(child, b""):
            raise InternalError(f"the process that tries grammars ended with exit status {_end(child)}")
        return child


def _ask(child: subprocess.Popen[bytes], data: bytes) -> bool:
    """Hand over a message and wait for the answer. False: the child has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(OSError):  # so says its output, too
        while data:
            data = data[child.stdin.write(data) :]
    return child.stdout.read(len(_READY)) == _READY


def _end(child: subprocess.Popen[bytes]) -> int:
    """The exit status of a child that ends."""
    with child:  # which closes the pipes
        return child.wait()


def main(cpu_seconds: float) -> None:
    """The child: try what comes on standard input, for as long as something comes."""
    from llguidance import LLMatcher

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while True:
        sink.write(_READY)
        sink.flush()
        length = source.read(_LENGTH_BYTES)
        if len(length) < _LENGTH_BYTES:
            return
        definition = source.read(int.from_bytes(length, "little")).decode()
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # whose signal ends the process
        with suppress(Exception):  # what is wrong with it is found again by who asks
            LLMatcher.validate_grammar(definition)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(float(sys.argv[1]))
