"""Grammars of tool calls: exactly what a dialect's parser reads, with arguments held to the tools' schemas."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pelton.errors import InvalidRequest
from pelton.request import Grammar, Tool
from pelton.text.lark import ANY_TEXT, ControlId, answer_rule, json_value, literal, quoted, triggered
from pelton.text.tools.dialect import Dialect

PARAM = "tools"
NO_CALL = r"/[^\s{\[](.|\n)*/"
"""A text that does not begin like calls do that nothing marks."""
_KEY = re.compile(r"[^\W\d]\w*")
_PYTHON_KEYWORDS = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "$schema",
        "title",
        "description",
    }
)
"""Of a schema, what keyword arguments can hold to."""


def calls_grammar(
    dialect: Dialect,
    tools: Sequence[Tool],
    control_id: ControlId,
    *,
    is_required: bool,
    is_parallel: bool,
    answer: Grammar | None,
) -> Grammar:
    """Calls of these tools and, unless one `is_required`, other text. `answer`: what that is to be; None: any text.

    Raises `InvalidRequest` for what no grammar can be made of.
    """
    layout = dialect.layout

    def text(of: str) -> str:
        return literal(of, dialect.markers, control_id)

    rules: list[str] = []
    openings: list[str] = []
    for number, tool in enumerate(tools):
        rules += _arguments(number, tool, is_python=layout.is_python)
        openings.append(layout.opened(tool.name))
    bodies = [f"arguments_{number} {text(layout.closing)}" for number in range(len(tools))]
    rules.append("call: " + " | ".join(f"{text(o)} {body}" for o, body in zip(openings, bodies, strict=True)))
    more = f"({text(layout.between)} call)*" if is_parallel else ""
    calls = f"{text(layout.head)} call {more} {text(layout.tail)}"
    if is_required:
        start = calls
    elif answer is not None:
        rules.append("answer: " + answer_rule(answer))
        start = f"{calls} | answer"
    elif not dialect.trigger:
        rules.append(f"TEXT: {NO_CALL}")
        start = f'{calls} | TEXT | ""'
    else:
        rules.append(f"TEXT: {ANY_TEXT}")
        begin, needed = triggered(dialect.trigger, 0, control_id)
        rules += needed
        length = len(dialect.trigger)
        if layout.head:
            block = f"{text(layout.head[length:])} call {more} {text(layout.tail)}"
        else:
            block = " | ".join(f"{text(o[length:])} {body}" for o, body in zip(openings, bodies, strict=True))
        start = f"({begin} ({block}))* TEXT" if is_parallel else f"{begin} ({block}) | TEXT"
    return Grammar(kind="lark", text="\n".join([f"start: {start}", *rules]), param=PARAM)


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of its arguments, which are an object."""
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **tool.parameters}


def _arguments(number: int, tool: Tool, *, is_python: bool) -> Iterator[str]:
    """The rules of a tool's arguments."""
    schema = schema_of(tool)
    if schema["type"] != "object":
        raise InvalidRequest(f"the parameters of the tool {tool.name!r} are no object", param=PARAM)
    if not is_python:
        yield f"arguments_{number}: {json_value(schema, is_strict=tool.strict)}"
        return
    unknown = sorted(schema.keys() - _PYTHON_KEYWORDS)
    if unknown and tool.strict:
        raise InvalidRequest(
            f"the tool {tool.name!r}: {unknown[0]!r} cannot be enforced of keyword arguments, in which this model "
            "calls tools",
            param=PARAM,
        )
    properties: dict[str, Any] = schema.get("properties") or {}
    required = frozenset(schema.get("required") or ())
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for at, (key, value) in enumerate(properties.items()):
        if not _KEY.fullmatch(key):
            raise InvalidRequest(f"the tool {tool.name!r}: {key[:64]!r} is no name of an argument", param=PARAM)
        value = value if isinstance(value, dict) else {}
        yield f"value_{number}_{at}: {json_value({**shared, **value}, is_strict=tool.strict)}"
        item = f"{quoted(key + '=')} value_{number}_{at}"
        rest, first = f"rest_{number}_{at + 1}", f"first_{number}_{at + 1}"
        if key in required:
            yield f'rest_{number}_{at}: ", " {item} {rest}'
            yield f"first_{number}_{at}: {item} {rest}"
        else:
            yield f'rest_{number}_{at}: (", " {item})? {rest}'
            yield f"first_{number}_{at}: {item} {rest} | {first}"
    yield f'rest_{number}_{len(properties)}: ""'
    yield f'first_{number}_{len(properties)}: ""'
    yield f"arguments_{number}: first_{number}_0"
