"""Takes connections, no more than the process has files for: others wait in the system's queue until one closes.

Asyncio's own servers take every connection, and log without end once no file descriptor is left.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable, Sized
from contextlib import suppress

log = logging.getLogger("pelton.server")

MOST_FILES = 65_536
"""That the process asks for."""
SPARE_FILES = 128
"""For models, engines, the store, logs and what is fetched; of few files, half."""
TOLD_SECONDS = 10.0
"""Between two log lines about the same."""
RETRY_SECONDS = 0.2
"""Between two looks whether there is room again."""


def raise_file_limit() -> int:
    """Ask for as many open files as the process may have, and give how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def max_connections(asked: int, num_files: int) -> int:
    """How many connections there may be at once: as many as were asked for (0: any number), and as there are files."""
    room = max(1, num_files - min(SPARE_FILES, num_files // 2))
    return min(asked, room) if asked else room


class Acceptor:
    """Takes the connections of one listening socket while there are fewer than `most`. Uvicorn sees it as one of
    asyncio's servers."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        connections: Sized,
        *,
        most: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        """`make` gives each connection's protocol; `connections`: those of all sockets that are open now."""
        listener.setblocking(False)
        self._listener = listener
        self._make = make
        self._connections = connections
        self._most = most
        self._tls = tls
        self._told = 0.0
        """When the last line was logged."""
        self._opening: set[asyncio.Task[None]] = set()
        """Connections whose TLS is being agreed on."""
        self._task = asyncio.create_task(self._run(), name="accept")

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._connections) + len(self._opening) >= self._most:
                self._tell(f"{self._most} connections are open, as many as may be (--max-connections): new ones wait")
                await asyncio.sleep(RETRY_SECONDS)
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except ConnectionError:  # it has gone already
                continue
            except OSError as error:
                self._tell(f"no connection can be taken, new ones wait: {error}")
                await asyncio.sleep(RETRY_SECONDS)
                continue
            task = asyncio.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make, connection, ssl=self._tls)
        except (OSError, asyncio.CancelledError) as error:  # TLS that was not agreed on; the server's end
            connection.close()
            log.debug("a connection could not be opened: %s", error)

    def _tell(self, problem: str) -> None:
        if time.monotonic() >= self._told + TOLD_SECONDS:
            self._told = time.monotonic()
            log.warning("%s", problem)

    def close(self) -> None:
        """Take no more."""
        for task in (self._task, *self._opening):
            task.cancel()

    async def wait_closed(self) -> None:
        """Until it has ended."""
        await asyncio.gather(self._task, *self._opening, return_exceptions=True)
