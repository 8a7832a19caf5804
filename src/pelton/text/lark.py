"""Pieces of grammars in Lark's notation, as `llguidance` reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pelton.errors import InvalidRequest
from pelton.request import Grammar, json_options

ControlId = Callable[[str], int | None]
"""The control token of that name, if there is one."""

ANY_TEXT = r"/(.|\n)*/"


def quoted(text: str) -> str:
    """A text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def literal(text: str, markers: Sequence[str], control_id: ControlId) -> str:
    """A text in which those of `markers` that are control tokens stand for their tokens; "" for none."""
    ids = {marker: id for marker in markers if (id := control_id(marker)) is not None}
    if not ids:
        return quoted(text) if text else ""
    pattern = "(" + "|".join(map(re.escape, ids)) + ")"
    pieces = (piece for piece in re.split(pattern, text) if piece)
    return " ".join(f"<[{ids[piece]}]>" if piece in ids else quoted(piece) for piece in pieces)


def json_value(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """A value of that schema. `is_strict`: keywords that cannot be enforced refuse the grammar."""
    return "%json " + json.dumps({**schema, "x-guidance": json_options(is_strict=is_strict)}, ensure_ascii=False)


def answer_rule(grammar: Grammar) -> str:
    """The right side of a rule for what a grammar of one of the simple kinds describes."""
    match grammar.kind:
        case "json_schema":
            schema = json.loads(grammar.text)
            if isinstance(schema, bool):
                schema = {} if schema else {"not": {}}
            return json_value(schema, is_strict=grammar.is_strict)
        case "regex":
            return "/" + re.sub(r"\\.|/", lambda found: found[0] if found[0] != "/" else r"\/", grammar.text) + "/"
        case "choice":
            return " | ".join(map(quoted, json.loads(grammar.text)))
    raise InvalidRequest(f"{grammar.param} cannot be used with tools that may be called", param=grammar.param)


def triggered(trigger: str, number: int, control_id: ControlId) -> tuple[str, list[str]]:
    """Any text up to a trigger, with it: an expression, and the rules that it needs."""
    if (id := control_id(trigger)) is not None:
        return f"TEXT <[{id}]>", []
    return f"trigger_{number}", [f"trigger_{number}[lazy]: {ANY_TEXT} {quoted(trigger)}"]
