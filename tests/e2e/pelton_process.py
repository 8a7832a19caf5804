"""The `pelton` command as a user runs it: in a process of its own, with its own home."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx

PELTON = [sys.executable, "-m", "pelton.cli"]


def environment(home: Path, **more: str) -> dict[str, str]:
    """Packed weights and prefixes are only kept where a test asks for it: each home would get its own."""
    settings = {"PELTON_HOME": str(home), "PELTON_OFFLINE": "1", "NO_COLOR": "1"}
    none = {"PELTON_PACKED_CACHE_SIZE": "0", "PELTON_PREFIX_CACHE_SIZE": "0"}
    return {**os.environ, **settings, **none, **more}


def pelton(home: Path, *args: str, stdin: str | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PELTON, *args],
        env=environment(home),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def private_bytes(pid: int) -> int:
    """Private memory that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def cpu_seconds(pid: int) -> float:
    """What a process has had of the processors."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


class Server:
    """A running `pelton serve`."""

    def __init__(self, home: Path, *args: str, **settings: str) -> None:
        self.started = time.monotonic()
        command = [*PELTON, "serve", *args, "--port", "0"]
        self.process = subprocess.Popen(command, env=environment(home, **settings), stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r"is ready at (http://\S+)", line):
                self.url = match[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self, timeout: float = 60) -> None:
        assert self._ready.wait(timeout), self.lines
        assert self.url, self.lines

    def children(self) -> list[int]:
        """Process ids of the server's children."""
        out = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        return [int(word) for word in out.stdout.split()]

    def engines(self) -> list[int]:
        """Those of them that are engines."""
        return [pid for pid in self.children() if b"pelton.engine.process" in _command(pid)]

    def post(self, body: dict, path: str = "/v1/chat/completions", timeout: float = 120) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def close(self) -> None:
        """Read what the ended process said, to its end."""
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


@contextlib.contextmanager
def serving(home: Path, *args: str, **settings: str) -> Iterator[Server]:
    """`settings`: environment variables."""
    server = Server(home, *args, **settings)
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
        server.close()
