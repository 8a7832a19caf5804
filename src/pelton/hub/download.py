"""A file over HTTP into a partial file that is kept across drops, restarts and processes, and goes on with a Range
request."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pelton.errors import HubError

if TYPE_CHECKING:
    import httpx2

CONNECT_SECONDS = 10.0
"""How long a server may take until it is connected."""
READ_SECONDS = 30.0
"""How long a download may stand still."""
MAX_FAILURES = 5
"""Connections in a row that may bring nothing."""
FIRST_WAIT, MAX_WAIT = 0.25, 30.0
"""Seconds between two of them, which double with each, and those that a server may ask for."""
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""States of a server, not of what it is asked for: it may answer soon."""


@dataclass(frozen=True)
class Address:
    """Where a file's bytes are. `size` None: not known. `client` opens one to ask with. `denied` says what to do where
    the server wants to know who asks. The headers go to the URL's own origin only, not to where it redirects."""

    url: str
    size: int | None
    client: Callable[[], AbstractContextManager[httpx2.Client]]
    denied: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The URL for people: what stands behind the question mark may be a secret."""
        return self.url.partition("?")[0]


class Passing(Exception):
    """A server cannot answer now. `wait`: seconds after which it wants to be asked again, as far as it says."""

    def __init__(self, status: int, wait: float) -> None:
        super().__init__(f"it answers with status {status}")
        self.wait = wait


def refuse_error(response: httpx2.Response, shown: str, denied: str) -> None:
    """Raises `Passing` for an error that may be over soon, and HubError for any other one."""
    if response.status_code in PASSING:
        asked = response.headers.get("Retry-After", "")
        raise Passing(response.status_code, min(float(asked), MAX_WAIT) if asked.isdecimal() else 0.0)
    if response.is_error:
        hint = f": {denied}" if response.status_code in (401, 403) else ""
        raise HubError(f"{shown} answers with status {response.status_code}{hint}")


def pause(num_failures: int, least: float = 0.0) -> None:
    """Wait before the next try, the longer the more have failed."""
    time.sleep(max(FIRST_WAIT * 2**num_failures, least))


def gather(address: Address, path: Path, tell: Callable[[int], None]) -> None:
    """Streams until the file at `path` is whole, going on where a connection dropped. The partial file stays where
    this raises HubError."""
    import httpx2

    failures = 0
    while True:
        before, wait = _size(path), 0.0
        if before == address.size:
            break
        try:
            with address.client() as client:
                _stream(client, address, path, before, tell)
            if address.size is None:
                break
            trouble = "the connection was closed early"
        except httpx2.TransportError as error:
            refuse_certificate(address.shown, error)
            trouble = first_line(error)
        except Passing as error:
            trouble, wait = str(error), error.wait
        here = _size(path)
        if address.size is not None and here >= address.size:
            break
        failures = 0 if here > before else failures + 1
        if failures >= MAX_FAILURES:
            raise HubError(
                f"the download stopped at {here} of {address.size or 'unknown'} bytes ({trouble}); "
                "pulling again goes on from there"
            )
        pause(failures, wait)


def gather_checked(path: Path, gather: Callable[[], None], check: Callable[[], None]) -> None:
    """`gather` what belongs at `path`, then `check`, which deletes what is wrong and raises HubError. The fault may
    lie in the part that was here: then from the start, once."""
    goes_on = path.exists()
    gather()
    try:
        check()
    except HubError:
        if not goes_on:
            raise
        gather()
        check()


def first_line(error: BaseException) -> str:
    """An error for people: no more than one line of it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip()[:300] if lines else type(error).__name__


def refuse_certificate(url: str, error: BaseException) -> None:
    """Raises HubError where that is what `error` is about: trying again is of no use."""
    for each in _causes(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            raise HubError(
                f"{url}: the server's certificate cannot be verified ({each.verify_message}); "
                "SSL_CERT_FILE names a file with the certificates to trust"
            ) from None


def _causes(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__ or at.__context__


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _stream(client: httpx2.Client, address: Address, path: Path, start: int, tell: Callable[[int], None]) -> None:
    """One connection: appends to the file from `start`, or from 0 where the server cannot do that. Raises HubError for
    one that sends more than the file has."""
    import httpx2

    headers = {"User-Agent": "pelton", "Accept-Encoding": "identity", **address.headers}
    if start:
        headers["Range"] = f"bytes={start}-"
    timeout = httpx2.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
    with client.stream("GET", address.url, headers=headers, timeout=timeout, follow_redirects=True) as response:
        if response.status_code == 416 and start:  # there is nothing after `start`: what we have is not the file
            path.unlink()
            _stream(client, address, path, 0, tell)
            return
        refuse_error(response, address.shown, address.denied)
        expected = f"bytes {start}-"
        if response.status_code != 206 or not response.headers.get("Content-Range", "").startswith(expected):
            start = 0
        with path.open("r+b" if path.exists() else "wb") as file:
            file.truncate(start)
            file.seek(start)
            tell(start)
            for chunk in response.iter_bytes():
                if address.size is not None and file.tell() + len(chunk) > address.size:
                    raise HubError(f"{address.shown} sends more than the {address.size} bytes that the file has")
                file.write(chunk)
                tell(file.tell())
