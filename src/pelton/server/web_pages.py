"""What keeps web pages out of a server without keys. A page from anywhere can send requests to its reader's machine,
and does not need to see the answers to do harm; a name of its own that leads to that machine (DNS rebinding) would let
it see them. No page has a key, so all of this is for servers without keys alone.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from pelton.errors import Forbidden

LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa")
"""Names that nobody can have on the Internet (RFC 6761, 6762, 8375, and ICANN's resolution on .internal)."""


class WebPages:
    """Which pages may use the server, and by which names it is called."""

    def __init__(self, origins: Iterable[str], hosts: Iterable[str]) -> None:
        """`origins`: those of CORS; `hosts`: names of the server beside those that only this machine or its network can
        have. "*" is all."""
        self._origins = frozenset(origins)
        self._hosts = frozenset(map(str.lower, hosts))

    def check(self, method: str, headers: Headers) -> None:
        """Raise `Forbidden` for a request that a page has sent that may not, or that calls the server by a name which
        may be such a page's own."""
        host = headers.get("host", "")
        name = _name(f"//{host}")
        if "*" not in self._hosts and not _is_private(name) and name not in self._hosts:
            raise Forbidden(
                f"this server is not known as {host[:200]!r}: --allowed-host {name[:200]} makes it so, and with keys "
                "it may be called anything"
            )
        origin = headers.get("origin")
        if "*" in self._origins or origin in self._origins:
            return
        if origin is None:
            # Browsers tell no origin of what is merely shown; to follow a link is to be shown it oneself.
            is_shown = method in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
            if headers.get("sec-fetch-site") != "cross-site" or is_shown:
                return
            origin = "other sites"
        elif _is_local(_name(origin)) or (host and origin.partition("://")[2].lower() == host.lower()):
            return
        raise Forbidden(f"pages of {origin[:200]} may not use this server: --cors-origin lets them, and so do keys")


def _name(url: str) -> str:
    """The host of an address, without its port; "": it has none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return "?."


def _is_private(name: str) -> bool:
    """Is that no name, or one that no page of the Internet can be under?"""
    return "." not in name or name.endswith(LOCAL_SUFFIXES) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_local(name: str) -> bool:
    """Is it a name of this machine?"""
    return (
        name == "localhost"
        or name.endswith(".localhost")
        or (_is_address(name) and ipaddress.ip_address(name).is_loopback)
    )
