"""Where what others wrote is run: chat templates, and the check of an answer against a client's schema.

Both take bounded steps, each of which may take any time and memory (a template doubles a list, a schema compares long
ones), so they run in children that the system ends at their limits (`confined`). As many run as are needed at once, up
to a bound for all models together; one of them stays.
"""

from __future__ import annotations

import atexit
import threading
from contextlib import suppress
from typing import Any, Literal

import msgspec

from pelton.confined import Confined, Limits, OverLimit, serve
from pelton.errors import Unavailable

LIMITS = Limits(cpu_seconds=3.0, memory_bytes=1 << 30)
"""A chat that fills a long context takes a tenth of a second."""


MAX_CHILDREN = 8
"""At once: what one model asks for is fewer."""


class Check(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Is this a template?"""

    source: str


class Render(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Render a template, once with each of these variables."""

    source: str
    inputs: list[dict[str, Any]]


class Validate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What is wrong with a JSON text by its schema?"""

    text: str
    schema: dict[str, Any] | bool


Work = Check | Render | Validate


class Made(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What came of it: renderings; what is wrong, if anything is."""

    texts: list[str] = []


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """It cannot be done."""

    reason: str
    kind: Literal["unreadable", "too much", "request"]
    """Because of the template, whatever it is given; of the time or memory that it takes; of what it was given."""


Result = Made | Refused

_encode = msgspec.msgpack.Encoder().encode
_decode_work = msgspec.msgpack.Decoder(Work).decode
_decode_result = msgspec.msgpack.Decoder(Result).decode


class Sandbox:
    """The children. Any thread may ask."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._idle: list[Confined] = []
        self._places = threading.Semaphore(MAX_CHILDREN)
        self._lock = threading.Lock()
        """Of the list."""

    def start(self) -> None:
        """Have a child ready, without waiting for it: the first request then does not wait either. Where none can be
        started now, that request will say so if it still is so."""
        child = self._take()
        with suppress(Unavailable):
            child.start()
        self._give(child)

    def do(self, work: Work) -> Result:
        """Have it done. Blocks until it is, also while there are children enough. Raises `Unavailable` where no child
        can be started."""
        try:
            message = _encode(work)
        except (OverflowError, ValueError) as error:  # an integer of over 64 bits
            return Refused(f"cannot be given what stands in the request: {error}", "request")
        with self._places:
            child = self._take()
            try:
                return _decode_result(child.ask(message))
            except OverLimit as error:
                most = {
                    "time": f"{self._limits.cpu_seconds:g} s of processor time",
                    "memory": f"{self._limits.memory_bytes >> 20} MiB of memory",
                }
                return Refused(f"takes over {most[error.what]}", "too much")
            finally:
                self._give(child)

    def close(self) -> None:
        """End the children that do nothing."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def _take(self) -> Confined:
        with self._lock:
            return self._idle.pop() if self._idle else Confined(__name__, self._limits)

    def _give(self, child: Confined) -> None:
        with self._lock:
            is_kept = not self._idle
            if is_kept:
                self._idle.append(child)
        if not is_kept:
            child.close()


sandbox = Sandbox()
"""Of this process."""
atexit.register(sandbox.close)


def work_on(message: bytes) -> bytes:
    """The child's part."""
    try:
        return _encode(_done(_decode_work(message)))
    except RecursionError:  # some texts of JSON that a request may hold go deeper than what is done with them
        return _encode(Refused("cannot be given what is nested so deep", "request"))


def _done(work: Work) -> Result:
    match work:
        case Check(source):
            from pelton.text.jinja import checked

            return checked(source)
        case Render(source, inputs):
            from pelton.text.jinja import rendered

            return rendered(source, inputs)
        case Validate(text, schema):
            from pelton.text.validation import fault_of

            fault = fault_of(text, schema)
            return Made([] if fault is None else [fault])


if __name__ == "__main__":
    serve(work_on)
