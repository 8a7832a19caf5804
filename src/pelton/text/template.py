"""One chat template: rendered in the sandbox, for it may do anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pelton.errors import InvalidRequest, UnsupportedModel
from pelton.text.sandbox import Check, Made, Refused, Render, sandbox

OWN = "the model's chat template"


class TooCostly(InvalidRequest):
    """The template takes too many steps, too much time or too much memory."""


@dataclass(frozen=True)
class Template:
    """A template's source, and how errors call it."""

    source: str
    name: str = OWN

    def check(self) -> None:
        """Raise `UnsupportedModel` for what is no template."""
        self._made(sandbox.do(Check(self.source)))

    def run(self, /, **inputs: Any) -> str:
        """Render with these variables, whatever their names. Raises what `run_all` does."""
        return self.run_all([inputs])[0]

    def run_all(self, inputs: Sequence[dict[str, Any]]) -> list[str]:
        """Render once with each of these variables. Raises `UnsupportedModel` for what is no template, `TooCostly`,
        and `InvalidRequest` for other errors: they depend on the messages."""
        return self._made(sandbox.do(Render(self.source, list(inputs)))).texts

    def _made(self, result: Made | Refused) -> Made:
        match result:
            case Refused(reason, "unreadable"):
                raise UnsupportedModel(f"{self.name} {reason}")
            case Refused(reason, kind):
                error = TooCostly if kind == "too much" else InvalidRequest
                raise error(f"{self.name} {reason}", param="messages")
            case _:
                return result
