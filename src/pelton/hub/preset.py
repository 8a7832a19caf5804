"""What a name of the store brings along besides its files: a system message, a template, parameters, messages."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from pelton import options
from pelton.errors import InvalidRequest
from pelton.request import Message, Request


class PresetMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that stands before each chat."""

    role: Literal["system", "user", "assistant"]
    content: str


_GO = re.compile(r"\{\{-?\s*(?:\.(?!\d)|\$|/\*|(?:if|else|end|range|with|define|template|block)(?![\w(]))")
"""What only templates in Go's syntax have."""


def jinja(template: str) -> str:
    """The template as it is, if it is in Jinja. Raises `InvalidRequest` for one in Go's syntax."""
    if found := _GO.search(template):
        at = template[found.start() : found.start() + 30].partition("\n")[0]
        raise InvalidRequest(
            f"the template is in Go's syntax ({at!r}), and only Jinja can be run here, as in the model's own file: "
            "leave it out to use that one",
            param="template",
        )
    return template


class Preset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a model's name brings along."""

    parent: str = ""
    """The name that it was made from."""
    system: str | None = None
    template: str | None = None
    """In Jinja; in place of the file's own."""
    parameters: dict[str, Any] = {}
    """By Ollama's names (`options`)."""
    messages: tuple[PresetMessage, ...] = ()
    license: tuple[str, ...] = ()

    def over(self, base: Preset | None) -> Preset:
        """The same with what `base` has and this has not."""
        if base is None:
            return self
        return Preset(
            parent=self.parent,
            system=base.system if self.system is None else self.system,
            template=base.template if self.template is None else self.template,
            parameters=base.parameters | self.parameters,
            messages=self.messages or base.messages,
            license=self.license or base.license,
        )

    @property
    def context(self) -> int | None:
        """Tokens that the model is to be loaded for."""
        return options.convert(self.parameters, "parameters").num_ctx

    def applied(self, request: Request) -> Request:
        """The request as the name means it: what the request says itself stands."""
        sampling = options.meaning(self.parameters, "parameters").sampling
        taken = {name: value for name, value in sampling.items() if name in request.left_open}
        if taken:
            request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **taken))
        if request.messages is None or not (self.messages or self.system is not None):
            return request
        return msgspec.structs.replace(request, messages=self._before(request.messages))

    def _before(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        own = tuple(Message(role=each.role, content=each.content) for each in self.messages)
        has_system = bool(messages) and messages[0].role in ("system", "developer")
        if has_system:
            return (messages[0], *own, *messages[1:])
        system = () if self.system is None else (Message(role="system", content=self.system),)
        return (*system, *own, *messages)
