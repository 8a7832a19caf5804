"""Which dialect a model calls tools in: by what its chat template writes."""

from __future__ import annotations

from pelton.text.tools.deepseek import DeepSeek, DeepSeekFenced
from pelton.text.tools.dialect import Dialect
from pelton.text.tools.hermes import Hermes
from pelton.text.tools.json_calls import GenericJSON, Llama3
from pelton.text.tools.mistral import Mistral, MistralNamed
from pelton.text.tools.pythonic import Pythonic

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Hermes(), Llama3(), Mistral(), MistralNamed(), DeepSeek(), DeepSeekFenced(), Pythonic(), GenericJSON(),
    )
}  # fmt: skip
"""By the names by which a setting chooses them."""

SIGNS = (
    (("[TOOL_CALLS]", "[ARGS]"), "mistral-named"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek-fenced"),
    (("<｜tool▁call▁begin｜>",), "deepseek"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "pythonic"),
    (("func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3"),
    (("ipython", '"parameters": '), "llama3"),
)
"""Texts of a template that together tell a dialect, those that tell most first."""


def dialect_of(template: str) -> Dialect:
    """The dialect of a model with that chat template; JSON alone where it tells none."""
    for texts, name in SIGNS:
        if all(text in template for text in texts):
            return DIALECTS[name]
    return DIALECTS["json"]


def shows_tools(template: str) -> bool:
    """Does the template tell the model which tools there are?"""
    return "tools" in template
