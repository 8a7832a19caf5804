"""What is known of the HTTP request that is being answered, for whatever runs on its behalf: `current()`."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from pelton.errors import Forbidden, InvalidRequest
from pelton.logs import request_id
from pelton.request import Usage
from pelton.server.keys import ANYONE, Key, Scope
from pelton.server.limits import Limits


@dataclass
class Context:
    """One HTTP request."""

    id: str = ""
    """Its `X-Request-Id`."""
    key: Key = ANYONE
    limits: Limits = field(default_factory=lambda: Limits(None, ANYONE))
    is_strict: bool = False
    """Are parameters refused that would be ignored?"""
    is_idle_priority: bool = False
    """Does it run on what nobody else needs?"""
    began: float = field(default_factory=time.perf_counter)
    route: str = ""
    """The path of its route as declared; "": of none."""
    trace: dict[str, str] = field(default_factory=dict)
    """Its W3C trace headers."""
    model: str | None = None
    usage: Usage | None = None
    """Of the generations that it has begun: the last one's model, and what all of them used."""

    def add_usage(self, model: str, usage: Usage) -> None:
        """One of its generations has ended."""
        self.model = model
        before = self.usage or Usage()
        self.usage = Usage(
            prompt_tokens=before.prompt_tokens + usage.prompt_tokens,
            completion_tokens=before.completion_tokens + usage.completion_tokens,
            cached_tokens=before.cached_tokens + usage.cached_tokens,
        )

    def require(self, scope: Scope) -> None:
        """Raise `Forbidden` unless the key has the scope."""
        if not self.key.may(scope):
            raise Forbidden(f"the key {self.key.name!r} lacks the scope {scope!r} that this route needs")

    def refuse_ignored(self, names: list[str]) -> None:
        """Raise `InvalidRequest` for parameters that would be ignored, where that was asked for."""
        if self.is_strict and names:
            raise InvalidRequest(
                f"not supported by this server, and strict parameters are on: {', '.join(names)}"[:400],
                param=names[0].split(".")[0].split("[")[0][:200],
            )


_current: ContextVar[Context] = ContextVar("pelton request")


def current() -> Context:
    """The request on whose behalf this task runs; one that may do everything where there is none."""
    return _current.get(None) or Context()


def enter(context: Context) -> None:
    """This task, and those that it starts, run on behalf of this request."""
    _current.set(context)
    request_id.set(context.id)
