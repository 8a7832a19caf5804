"""A request's grammar in the form that `llguidance` reads."""

from __future__ import annotations

from typing import Any

from pelton.request import Grammar, json_options


def definition_of(grammar: Grammar) -> str:
    """The definition. Raises `ValueError` for a text that is none of its kind."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_schema":
            options: Any = json_options(is_strict=grammar.is_strict)
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case _:
            raise ValueError(f"the engine knows no {grammar.kind}")
