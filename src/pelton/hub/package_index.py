"""Where pip would look for a package's file: its own settings, and the simple repository API that indexes speak.

Only the settings are pip's (`pip config list`: its files and the PIP_ variables); the pages are read here, because
pip itself cannot say where a file is without fetching it whole in most of its versions. What is honoured: index-url,
extra-index-url, no-index, find-links, proxy, cert, client-cert, trusted-host, credentials in a URL and ~/.netrc.
Source: https://packaging.python.org/en/latest/specifications/simple-repository-api/
"""

from __future__ import annotations

import ast
import base64
import netrc
import re
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import url2pathname

import msgspec

from pelton.errors import HubError
from pelton.hub.download import (
    CONNECT_SECONDS,
    READ_SECONDS,
    Address,
    Passing,
    first_line,
    pause,
    refuse_certificate,
    refuse_error,
)

if TYPE_CHECKING:
    import httpx2

PYPI = "https://pypi.org/simple"
DENIED = "it wants a name and a password: in pip's index-url (https://NAME:PASSWORD@HOST/...) or in ~/.netrc"
MAX_TRIES = 3
"""Of asking for a page."""
MAX_PAGE = 16 << 20
"""Bytes of an index's page."""
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_SECTIONS = ("global", "install", ":env:")
"""Those that pip reads for `pip install`, the later ones first in right."""
_LINE = re.compile(r"(?P<section>[^.=]+)\.(?P<name>[^=]+)=(?P<value>'.*'|\".*\")")


def settings() -> dict[str, str]:
    """What pip is told for `pip install`, by option ("index-url"). Nothing where there is no pip: its defaults hold."""
    command = [sys.executable, "-P", "-m", "pip", "config", "list", "--disable-pip-version-check"]
    try:
        pip = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise HubError("pip does not say its settings within a minute (`pip config list`)") from None
    if pip.returncode:
        if "No module named pip" in pip.stderr:
            return {}
        raise HubError(f"pip cannot read its settings: {first_line(HubError(pip.stderr))}")
    return _read_settings(pip.stdout)


def _read_settings(text: str) -> dict[str, str]:
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in text.splitlines():
        if (match := _LINE.fullmatch(line.strip())) and match["section"] in found:
            found[match["section"]][match["name"]] = ast.literal_eval(match["value"])
    merged: dict[str, str] = {}
    for section in _SECTIONS:
        merged |= {name: value for name, value in found[section].items() if value.strip()}
    return merged


def client(options: Mapping[str, str], ca_bundle: str) -> httpx2.Client:
    """An HTTP client that trusts and goes through what pip does. `ca_bundle` "": the system's certificates."""
    import httpx2

    authorities = options.get("cert") or ca_bundle
    try:
        context = _context(authorities) if authorities else httpx2.create_ssl_context()
        if certificate := options.get("client-cert"):
            context.load_cert_chain(Path(certificate).expanduser())
    except (OSError, ssl.SSLError) as error:
        raise HubError(f"the certificates that pip is told to use cannot be read: {error}") from None
    proxy = options.get("proxy")
    if proxy and "://" not in proxy:
        proxy = f"http://{proxy}"
    mounts = {
        f"all://{host}": httpx2.HTTPTransport(verify=httpx2.create_ssl_context(verify=False), proxy=proxy)
        for host in options.get("trusted-host", "").split()
    }
    return httpx2.Client(verify=context, proxy=proxy, mounts=mounts)


def _context(authorities: str) -> ssl.SSLContext:
    path = Path(authorities).expanduser()
    return ssl.create_default_context(capath=path) if path.is_dir() else ssl.create_default_context(cafile=path)


@dataclass(frozen=True)
class _Place:
    """A URL or a path to look in, and what its own origin is told."""

    where: str
    headers: Mapping[str, str]

    def headers_for(self, url: str) -> Mapping[str, str]:
        """The credentials for `url`, which was found here: never another's."""
        if _origin(url) == _origin(self.where):
            return self.headers
        return _from_netrc(url)


def find(
    project: str, file: str, size: int, options: Mapping[str, str], client: Callable[[], httpx2.Client]
) -> Path | Address:
    """The first place that has `file` of `project` (a normalized name), size in bytes. Raises HubError that says what
    each place answered."""
    answers = []
    with client() as http:
        for place in _places(project, options):
            try:
                found = _look(place, file, http)
            except HubError as error:
                answers.append(str(error))
                continue
            if isinstance(found, Path):
                return found
            if found is not None:
                url, headers = _without_credentials(found)
                return Address(url, size, client, DENIED, headers or place.headers_for(url))
            answers.append(f"{place.where} does not have it")
    raise HubError(f"{file} is nowhere that pip is told to look: {'; '.join(answers) or 'no place is named'}")


def _places(project: str, options: Mapping[str, str]) -> Iterator[_Place]:
    """In the order of what they cost: folders first."""
    wheres = [*options.get("find-links", "").split()]
    if options.get("no-index", "").lower() not in {"1", "true", "yes", "on", "y", "t"}:
        indexes = [options.get("index-url", PYPI), *options.get("extra-index-url", "").split()]
        wheres += [f"{index.strip().rstrip('/')}/{project}/" for index in indexes]
    for where in sorted(wheres, key=_is_remote):
        url, headers = _without_credentials(where)
        yield _Place(url, headers or (_from_netrc(url) if _is_remote(url) else {}))


def _is_remote(where: str) -> bool:
    return urlsplit(where).scheme in ("http", "https")


def _look(place: _Place, file: str, http: httpx2.Client) -> Path | str | None:
    """A path, or the URL of the file; None where the place does not have it."""
    if _is_remote(place.where):
        if _name(place.where) == file:
            return place.where
        base, kind, text = _page(place, http)
        found = _links(base, kind, text, file)
        return found if found is None or _is_remote(found) else _local(found)
    path = _local(place.where)
    if path.is_dir():
        if (path / file).is_file():
            return path / file
        path = path / "index.html"
    if path.name == file and path.is_file():
        return path
    if not path.is_file():
        return None
    found = _links(path.absolute().as_uri(), "text/html", path.read_bytes(), file)
    return found if found is None or _is_remote(found) else _local(found)


def _local(where: str) -> Path:
    """A path, or the path of a file: URL."""
    path = url2pathname(urlsplit(where).path) if where.startswith("file:") else where
    return Path(path).expanduser()


def _page(place: _Place, http: httpx2.Client) -> tuple[str, str, bytes]:
    """Where a page is in the end, its type and its bytes."""
    import httpx2

    wait = 0.0
    for attempt in range(MAX_TRIES):
        if attempt:
            pause(attempt, wait)
        try:
            return _ask(place, http)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            refuse_certificate(place.where, error)
            trouble = first_line(error)
        except Passing as error:
            trouble, wait = str(error), error.wait
    raise HubError(f"cannot reach {place.where}: {trouble}")


def _ask(place: _Place, http: httpx2.Client) -> tuple[str, str, bytes]:
    import httpx2

    headers = {"User-Agent": "pelton", "Accept": _ACCEPT, **place.headers}
    timeout = httpx2.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
    text = bytearray()
    with http.stream("GET", place.where, headers=headers, timeout=timeout, follow_redirects=True) as response:
        refuse_error(response, place.where, DENIED)
        for chunk in response.iter_bytes():
            text += chunk
            if len(text) > MAX_PAGE:
                raise HubError(f"{place.where} is a page of more than {MAX_PAGE} bytes")
        return str(response.url), response.headers.get("Content-Type", ""), bytes(text)


class _JSONFile(msgspec.Struct):
    filename: str
    url: str


class _JSONPage(msgspec.Struct):
    files: list[_JSONFile]


class _HTMLPage(HTMLParser):
    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        with suppress(ValueError):  # what is no URL is no link
            if href and tag == "base":
                self.base = urljoin(self.base, href)
            elif href and tag == "a":
                self.urls.append(urljoin(self.base, href.strip()))


def _links(base: str, kind: str, text: bytes, file: str) -> str | None:
    """The page's URL for that file, if it has one."""
    if "json" in kind:
        try:
            page = msgspec.json.decode(text, type=_JSONPage)
            return next((urljoin(base, each.url) for each in page.files if each.filename == file), None)
        except (msgspec.DecodeError, ValueError) as error:
            raise HubError(f"{_without_credentials(base)[0]} is not an index's page: {error}") from None
    parser = _HTMLPage(base)
    parser.feed(text.decode(errors="replace"))
    return next((url for url in parser.urls if _name(url) == file), None)


def _name(url: str) -> str:
    return unquote(urlsplit(url).path.rpartition("/")[2])


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _without_credentials(url: str) -> tuple[str, dict[str, str]]:
    """A URL without NAME:PASSWORD@ and fragment, and the header that says them."""
    parts = urlsplit(url)
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))
    if parts.username is None:
        return bare, {}
    return bare, _basic(unquote(parts.username), unquote(parts.password or ""))


def _from_netrc(url: str) -> dict[str, str]:
    with suppress(OSError, netrc.NetrcParseError):
        if found := netrc.netrc().authenticators(urlsplit(url).hostname or ""):
            return _basic(found[0], found[2])
    return {}


def _basic(name: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}
