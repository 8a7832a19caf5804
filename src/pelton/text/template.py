"""One Jinja template as Hugging Face runs them: the same settings, filters and functions, but with fuel."""

from __future__ import annotations

import datetime
import json
import re
from typing import TYPE_CHECKING, Any

from pelton.errors import InvalidRequest, UnsupportedModel

if TYPE_CHECKING:
    import minijinja

FUEL = 10_000_000
"""Steps that a rendering may take; minijinja also charges for the size of what it builds."""
MAX_RENDERED = 64 << 20
"""Characters that a rendering may have."""


class Template:
    """A template's source, compiled when it is first needed."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._environment: minijinja.Environment | None = None

    def check(self) -> None:
        """Raise `UnsupportedModel` for what is no template."""
        if self._environment is None:
            self._compile()

    def run(self, /, **inputs: Any) -> str:
        """Render with these variables, whatever their names. Errors become `InvalidRequest`: they depend on the
        messages."""
        import minijinja

        environment = self._environment or self._compile()
        try:
            text = environment.render_template("chat", **inputs)
        except minijinja.TemplateError as error:
            kind = OutOfFuel if error.kind == "OutOfFuel" else InvalidRequest
            raise kind(f"the model's chat template fails: {_reason(error)}", param="messages") from None
        except _Refusal as error:
            raise InvalidRequest(f"the model's chat template refuses: {error}", param="messages") from None
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:  # Of our filters, wrongly used.
            raise InvalidRequest(f"the model's chat template fails: {error}", param="messages") from None
        if len(text) > MAX_RENDERED:
            raise InvalidRequest(f"the rendered chat has {len(text)} characters, over {MAX_RENDERED}", param="messages")
        return text

    def _compile(self) -> minijinja.Environment:
        import minijinja

        environment = minijinja.Environment(
            fuel=FUEL, trim_blocks=True, lstrip_blocks=True, auto_escape_callback=lambda _: False
        )
        environment.add_filter("tojson", _tojson)
        environment.add_filter("indent", _indent)
        environment.add_filter("trim", _trim)
        environment.add_global("raise_exception", _raise_exception)
        environment.add_global("strftime_now", _strftime_now)
        # Hugging Face's block for the assistant's words is a scope and nothing else when text is rendered.
        source = re.sub(r"\{%([-+]?)\s*generation\s*([-+]?)%\}", r"{%\1 with \2%}", self.source)
        source = re.sub(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}", r"{%\1 endwith \2%}", source)
        try:
            environment.add_template("chat", source)
        except minijinja.TemplateError as error:
            raise UnsupportedModel(f"the model's chat template cannot be read: {_reason(error)}") from None
        self._environment = environment
        return environment


class OutOfFuel(InvalidRequest):
    """The template ran for too long."""


class _Refusal(Exception):
    """`raise_exception` was called by a template."""


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    if len(format) > 200:
        raise _Refusal("strftime_now: a format over 200 characters")
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson`: plain JSON, nothing escaped for HTML."""
    if (indent if isinstance(indent, int) else len(indent or "")) > 16:
        raise _Refusal("tojson: indent over 16")
    if separators is not None:
        separators = tuple(separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's `indent`; minijinja's loses a line feed at the end."""
    space = width if isinstance(width, str) else " " * min(width, 1000)
    head, *rest = f"{text}\n".splitlines()
    if len(head) + sum(map(len, rest)) + len(space) * len(rest) > MAX_RENDERED:
        raise _Refusal(f"indent: the result would be over {MAX_RENDERED} characters")
    lines = [head, *(space + line if line or blank else line for line in rest)]
    return (space if first else "") + "\n".join(lines)


def _trim(text: Any, chars: str | None = None) -> str:
    """Jinja's `trim`; minijinja takes other characters for white space."""
    return str(text).strip(chars)


def _reason(error: minijinja.TemplateError) -> str:
    """The error's first line: what follows shows the whole template."""
    return (error.detail or error.message).partition("\n")[0]
