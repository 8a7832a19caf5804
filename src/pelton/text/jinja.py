"""Jinja templates as Hugging Face runs them: the same settings, filters and functions, but with fuel. Run in the
sandbox; the only home of `minijinja`."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pelton.text.sandbox import Made, Refused, Result

if TYPE_CHECKING:
    import minijinja

FUEL = 10_000_000
"""Steps that a rendering may take; minijinja also charges for the size of what it builds."""
MAX_RENDERED = 64 << 20
"""Characters that a rendering may have."""


def checked(source: str) -> Result:
    """Can a template be read?"""
    import minijinja

    try:
        _compiled(source)
    except minijinja.TemplateError as error:
        return Refused(f"cannot be read: {_reason(error)}", "unreadable")
    return Made()


def rendered(source: str, inputs: Sequence[dict[str, Any]]) -> Result:
    """The renderings of a template, with each of these variables."""
    import minijinja

    if isinstance(found := checked(source), Refused):
        return found
    try:
        texts = [_compiled(source).render_template("chat", **each) for each in inputs]
    except minijinja.TemplateError as error:
        return Refused(f"fails: {_reason(error)}", "too much" if error.kind == "OutOfFuel" else "request")
    except _Refusal as error:
        return Refused(f"refuses: {error}", "request")
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:  # Of our filters, wrongly used.
        return Refused(f"fails: {error}", "request")
    longest = max(map(len, texts), default=0)
    if longest > MAX_RENDERED:
        return Refused(f"renders {longest} characters, over {MAX_RENDERED}", "too much")
    return Made(texts)


@functools.lru_cache(16)
def _compiled(source: str) -> minijinja.Environment:
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
    source = re.sub(r"\{%([-+]?)\s*generation\s*([-+]?)%\}", r"{%\1 with \2%}", source)
    source = re.sub(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}", r"{%\1 endwith \2%}", source)
    environment.add_template("chat", source)
    return environment


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
