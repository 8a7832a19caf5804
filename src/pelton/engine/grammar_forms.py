"""A request's grammar in the form that `llguidance` reads."""

from __future__ import annotations

import re
from typing import Any

from pelton.request import JSON_WHITE_SPACE, Grammar


def definition_of(grammar: Grammar) -> str:
    """The definition. Raises `ValueError` for a text that is none of its kind."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_schema":
            options: Any = {
                "whitespace_pattern": JSON_WHITE_SPACE,
                "lenient": not grammar.is_strict,
                "coerce_one_of": not grammar.is_strict,
            }
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "gbnf":
            return LLMatcher.grammar_from_lark(_from_gbnf(grammar.text))
        case _:
            raise ValueError(f"the engine knows no {grammar.kind}")


def _from_gbnf(text: str) -> str:
    """llama.cpp's notation in Lark's."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(re.sub(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", _unescaped, text))
    except Exception as error:  # the library raises no type of its own
        raise ValueError(f"it is no GBNF: {error}") from None


def _unescaped(escape: re.Match[str]) -> str:
    """A character in place of its number, which the library writes wrongly."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
