"""What OpenAI's clients, vLLM's and llama.cpp's give to describe an answer -> `Grammar`."""

from __future__ import annotations

from typing import Any

import msgspec

from pelton import structured
from pelton.errors import InvalidRequest
from pelton.request import Grammar
from pelton.server import openai_types as wire


def grammar_of(body: wire.SamplingFields) -> Grammar | None:
    """The one that a request gives."""
    return structured.one_of(
        [
            _response_format(body.response_format),
            _structured_outputs(body.structured_outputs),
            None if body.guided_json is None else _json(body.guided_json, "guided_json"),
            None if body.guided_regex is None else structured.regex(body.guided_regex, "guided_regex"),
            None if body.guided_choice is None else structured.choice(body.guided_choice, "guided_choice"),
            None if body.guided_grammar is None else structured.grammar(body.guided_grammar, "guided_grammar"),
            None if body.grammar is None else structured.grammar(body.grammar, "grammar"),
        ]
    )


def _response_format(given: wire.ResponseFormat | None) -> Grammar | None:
    """A schema may stand where OpenAI or where older servers have it."""
    match given:
        case None | wire.ResponseFormat(type="text"):
            return None
        case wire.ResponseFormat(type="structural_tag"):
            tags = {"structures": given.structures, "triggers": given.triggers}
            return structured.structural_tag(tags, "response_format")
        case wire.ResponseFormat(type="grammar" | "regex"):
            text = given.grammar if given.type == "grammar" else given.pattern
            field = "grammar" if given.type == "grammar" else "pattern"
            if text is None:
                raise InvalidRequest(f"response_format.{field} is missing", param="response_format")
            make = structured.grammar if given.type == "grammar" else structured.regex
            return make(text, f"response_format.{field}")
    name, schema, is_strict = "response_format.schema", given.schema, True
    if given.json_schema is not None:
        name, schema = "response_format.json_schema.schema", given.json_schema.schema
        is_strict = given.json_schema.strict is not False
    if given.type == "json_object" and schema is None:
        return structured.json_object(name)
    if schema is None:
        raise InvalidRequest(f"{name} is missing", param="response_format")
    return structured.json_schema(schema, name, is_strict=is_strict)


def _structured_outputs(given: wire.StructuredOutputs | None) -> Grammar | None:
    if given is None:
        return None
    base = "structured_outputs"
    found = structured.one_of(
        [
            None if given.json is None else _json(given.json, f"{base}.json"),
            structured.json_object(f"{base}.json_object") if given.json_object else None,
            None if given.regex is None else structured.regex(given.regex, f"{base}.regex"),
            None if given.choice is None else structured.choice(given.choice, f"{base}.choice"),
            None if given.grammar is None else structured.grammar(given.grammar, f"{base}.grammar"),
            None
            if given.structural_tag is None
            else structured.structural_tag(given.structural_tag, f"{base}.structural_tag"),
        ]
    )
    if found is None:
        raise InvalidRequest(f"{base} describes nothing", param=base)
    return found


def _json(given: dict[str, Any] | bool | str, param: str) -> Grammar:
    """A schema, or its JSON text."""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given, type=dict[str, Any] | bool)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{param} is no JSON schema: {str(error)[:200]}", param=param) from None
    return structured.json_schema(given, param)
