"""What clients give to describe an answer -> `Grammar`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pelton.errors import InvalidRequest
from pelton.request import Grammar


def json_schema(schema: Mapping[str, Any] | bool, param: str, *, is_strict: bool = True) -> Grammar:
    """JSON of a schema."""
    try:
        text = msgspec.json.encode(schema).decode()
    except (TypeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from None
    return Grammar(kind="json_schema", text=text, param=param, is_strict=is_strict)


def json_object(param: str) -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"}, param)


def choice(choices: Sequence[str], param: str) -> Grammar:
    """One of some texts."""
    if isinstance(choices, str) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise InvalidRequest(f"{param} must be a list of texts, none of them empty", param=param)
    return Grammar(kind="choice", text=msgspec.json.encode(list(choices)).decode(), param=param)


def regex(pattern: str, param: str) -> Grammar:
    """A text that a regular expression matches, all of it."""
    return Grammar(kind="regex", text=pattern, param=param)


def grammar(text: str, param: str) -> Grammar:
    """A text of a context-free grammar, in llama.cpp's notation (GBNF), which has `::=`, or in Lark's."""
    return Grammar(kind="gbnf" if "::=" in text else "lark", text=text, param=param)


def structural_tag(tags: Any, param: str) -> Grammar:
    """Free text with tags whose content has a form: plain data, or its JSON text."""
    text = tags if isinstance(tags, str) else msgspec.json.encode(tags).decode()
    return Grammar(kind="structural_tag", text=text, param=param)


def one_of(grammars: Sequence[Grammar | None]) -> Grammar | None:
    """The one that is given. Raises `InvalidRequest` where there are two."""
    given = [each for each in grammars if each is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0].param} and {given[1].param} exclude each other", param=given[1].param)
    return given[0] if given else None
