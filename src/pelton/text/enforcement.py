"""What of an answer is enforced while it is drawn, and what is checked when it has ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from pelton.errors import InvalidRequest
from pelton.request import Grammar, Request, Thinking
from pelton.text.gbnf import lark_of
from pelton.text.lark import ControlId, answer_rule
from pelton.text.output import Format
from pelton.text.sandbox import Made, Refused, Validate, sandbox
from pelton.text.structural_tags import tags_grammar
from pelton.text.tools.grammar import calls_grammar, schema_of

Schema = Mapping[str, Any] | bool


class Enforcement(NamedTuple):
    """For the engine, and for the answer's end."""

    form: Format
    """How the answer is to be read then."""
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    schema: Schema | None = None
    """Of the answer's text; None: it need not be JSON."""
    is_strict: bool = True
    """Can it be nothing else?"""
    arguments: Mapping[str, Schema] = {}
    """Of the tools whose arguments are enforced."""

    @property
    def has_schemas(self) -> bool:
        """Is there anything to be checked when the answer has ended?"""
        return self.schema is not None or bool(self.arguments)

    def faults(self, text: str, calls: list[tuple[str, str]]) -> list[str]:
        """What a finished answer does not fulfil: sentences. `calls`: names and arguments. Blocks until they
        are known."""
        found = []
        if self.schema is not None and not calls and (fault := _fault(text, self.schema)):
            found.append(f"the answer does not fulfil its schema: {fault}")
        for name, arguments in calls:
            if name in self.arguments and (fault := _fault(arguments, self.arguments[name])):
                found.append(f"the arguments of {name} do not fulfil their schema: {fault}")
        return found


def _fault(text: str, schema: Schema) -> str | None:
    match sandbox.do(Validate(text, dict(schema) if isinstance(schema, Mapping) else schema)):
        case Made(faults):
            return faults[0] if faults else None
        case Refused(reason):
            return f"it cannot be checked: this {reason}"


def enforcement_of(request: Request, form: Format, control_id: ControlId) -> Enforcement:
    """What is enforced of the answer to a request. Raises `InvalidRequest` for what cannot be."""
    answer = request.grammar
    tools = [tool for tool in request.tools if tool.name in form.names] if form.dialect is not None else []
    is_required = request.tool_choice.mode == "required"
    is_called = bool(tools) and (is_required or answer is not None or any(tool.strict for tool in tools))
    grammar = None if answer is None else _for_engine(answer, control_id)
    if is_called:
        assert form.dialect is not None
        grammar = calls_grammar(
            form.dialect,
            tools,
            control_id,
            is_required=is_required,
            is_parallel=request.parallel_tool_calls,
            answer=answer,
        )
    has_schema = answer is not None and answer.kind == "json_schema" and not (is_called and is_required)
    if is_called and form.dialect is not None:
        form = form._replace(dialect=form.dialect.enforced())
    return Enforcement(
        form=form,
        grammar=grammar,
        thinking=_thinking(request, form, grammar),
        schema=_schema(answer) if answer is not None and has_schema else None,
        is_strict=answer is None or answer.is_strict,
        arguments={tool.name: schema_of(tool) for tool in tools} if is_called else {},
    )


def _for_engine(grammar: Grammar, control_id: ControlId) -> Grammar:
    if grammar.kind == "structural_tag":
        return tags_grammar(grammar, control_id)
    if grammar.kind == "gbnf":
        try:
            return msgspec.structs.replace(grammar, kind="lark", text=lark_of(grammar.text))
        except ValueError as error:
            raise InvalidRequest(f"{grammar.param} is no GBNF: {error}", param=grammar.param) from None
    if grammar.kind == "choice":
        return msgspec.structs.replace(grammar, kind="lark", text="start: " + answer_rule(grammar))
    return grammar


def _thinking(request: Request, form: Format, grammar: Grammar | None) -> Thinking | None:
    if form.tags is None or (grammar is None and form.budget is None):
        return None
    return Thinking(open=form.tags.open, close=form.tags.close, is_open=form.is_open, budget=form.budget)


def _schema(grammar: Grammar) -> Schema:
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{grammar.param} is not JSON", param=grammar.param) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{grammar.param} is no JSON schema", param=grammar.param)
    return schema
