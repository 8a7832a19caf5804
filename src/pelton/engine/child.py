"""An engine's process. It can be begun before anybody knows what it is to load: what it imports takes a while."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


class Child:
    """A fresh `python -m pelton.engine.process`, with a socket to talk to it.

    The process inherits the other one of the pair, and holds the read end of a pipe as its standard input: it ends when
    that closes, so that it never outlives this one, however this one ends.
    """

    def __init__(self) -> None:
        """Raises OSError where the system has no process or file descriptor left."""
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # what lies in the current folder is not imported, whatever its name
                    "-m",
                    "pelton.engine.process",
                    str(theirs.fileno()),
                ],
                stdin=subprocess.PIPE,
                bufsize=0,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is the caller's matter
            )

    @property
    def pid(self) -> int | None:
        """The process id while it lives."""
        return self._process.pid if self._process.returncode is None else None

    async def ended(self) -> int:
        """Wait for its end, and give its exit status as `subprocess` does."""
        import asyncio

        loop = asyncio.get_running_loop()
        end: asyncio.Future[int] = loop.create_future()

        def settle(code: int) -> None:
            if not end.cancelled():
                end.set_result(code)

        def wait() -> None:
            code = self._process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, code)

        threading.Thread(target=wait, name="end of the engine", daemon=True).start()
        return await end

    def hang_up(self) -> None:
        """Close its standard input: it ends at once, mute."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """End it, also where it stands still."""
        self._process.kill()

    def close(self) -> None:
        """End one that nobody has used. One that has ended stays so."""
        self.hang_up()
        self.kill()
        self._process.wait()
        self.socket.close()
