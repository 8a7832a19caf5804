"""Structural tags: free text in which some tags, once they begin, have a content of a given form.

Source: xgrammar's and vLLM's `structural_tag` with `structures` and `triggers`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pelton.errors import InvalidRequest
from pelton.request import Grammar
from pelton.text.lark import ANY_TEXT, ControlId, json_value, literal, triggered


class _Structure(msgspec.Struct, frozen=True):
    begin: str
    end: str
    schema: dict[str, Any] = {}


class _Tags(msgspec.Struct, frozen=True):
    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


def tags_grammar(grammar: Grammar, control_id: ControlId) -> Grammar:
    """The grammar in Lark's notation. Raises `InvalidRequest`."""
    try:
        tags = msgspec.json.decode(grammar.text, type=_Tags)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{grammar.param} is wrong: {error}", param=grammar.param) from None
    by_trigger: dict[str, list[_Structure]] = {}
    for structure in tags.structures:
        trigger = next((each for each in tags.triggers if each and structure.begin.startswith(each)), None)
        if trigger is None:
            message = f"{grammar.param}: no trigger begins the tag {structure.begin[:64]!r}"
            raise InvalidRequest(message, param=grammar.param)
        by_trigger.setdefault(trigger, []).append(structure)
    if not by_trigger:
        raise InvalidRequest(f"{grammar.param} has no structures", param=grammar.param)
    rules = [f"TEXT: {ANY_TEXT}"]
    blocks: list[str] = []
    for number, (trigger, structures) in enumerate(by_trigger.items()):
        start, needed = triggered(trigger, number, control_id)
        rules += needed
        options = []
        for at, structure in enumerate(structures):
            rules.append(f"value_{number}_{at}: {json_value(structure.schema, is_strict=grammar.is_strict)}")
            rest = literal(structure.begin[len(trigger) :], tags.triggers, control_id)
            end = literal(structure.end, tags.triggers, control_id)
            options.append(f"{rest} value_{number}_{at} {end}")
        blocks.append(f"{start} ({' | '.join(options)})")
    text = "\n".join([f"start: ({' | '.join(blocks)})* TEXT", *rules])
    return Grammar(kind="lark", text=text, param=grammar.param, is_strict=grammar.is_strict)
