"""Grammars of calls: what they allow is what the parsers read, and what the tools' schemas say."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from pelton.errors import InvalidRequest
from pelton.request import Grammar, Message, Request, Tool, ToolChoice
from pelton.text.enforcement import Enforcement, enforcement_of
from pelton.text.output import Format
from pelton.text.reasoning import KNOWN
from pelton.text.tools.detect import DIALECTS
from pelton.text.validation import fault_of
from tests.unit.grammar_walk import Walk
from tests.unit.test_tool_dialects import read, written

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"$ref": "#/$defs/days"},
        "units": {"enum": ["C", "F"]},
    },
    "required": ["city", "units"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
TOOLS = (
    Tool(name="f", parameters=SCHEMA, strict=True),
    Tool(name="a-b.c", parameters={"type": "object", "properties": {"on": {"type": "boolean"}}}),
)
GOOD = [("f", {"city": 'O"s', "days": 3, "units": "C"}), ("f", {"city": "", "units": "F"})]


def enforced(dialect: str | None, control: dict[str, int] = {}, **fields: Any) -> Enforcement:  # noqa: B006
    request = Request(id="r", model="m", messages=(Message(role="user", content="Hi"),), **fields)
    names = request.tool_choice.names or [tool.name for tool in request.tools]
    form = Format(dialect=None if dialect is None else DIALECTS[dialect], names=names)
    return enforcement_of(request, form, control.get)


def walk(dialect: str, **fields: Any) -> Walk:
    grammar = enforced(dialect, tools=TOOLS, **fields).grammar
    assert grammar is not None
    return Walk(grammar)


def text_of(calls: list[tuple[str, dict[str, Any]]], dialect: str) -> str:
    layout = DIALECTS[dialect].layout
    if not layout.is_python:
        return written(calls, layout)

    def keywords(arguments: dict[str, Any]) -> str:
        return ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())

    return "[" + ", ".join(f"{name}({keywords(arguments)})" for name, arguments in calls) + "]"


REQUIRED = ToolChoice(mode="required")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_required_calls(dialect):
    grammar = walk(dialect, tool_choice=REQUIRED)
    assert grammar.accepts(text_of(GOOD, dialect))
    assert grammar.accepts(text_of(GOOD[:1], dialect))
    assert not grammar.accepts("Hello")
    assert not grammar.accepts("")
    for wrong in (("f", {"city": "x"}), ("f", {"city": "x", "units": "K"}), ("g", {})):
        assert not grammar.accepts(text_of([wrong], dialect))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_whatever_the_grammar_allows_is_read_as_calls_that_fulfil_their_schemas(dialect):
    grammar = walk(dialect, tool_choice=ToolChoice(mode="required", names=("f",)))
    texts = [text for seed in range(40) if (text := grammar.random(seed)) is not None]
    assert len(texts) > 20
    for text in texts:
        _, said, calls, warnings = read(text, dialect)
        assert (said, warnings) == ("", []), text
        assert calls
        for name, arguments in calls:
            assert name == "f"
            jsonschema.validate(json.loads(arguments), SCHEMA)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_call_where_only_one_may_be_made(dialect):
    grammar = walk(dialect, tool_choice=REQUIRED, parallel_tool_calls=False)
    assert grammar.accepts(text_of(GOOD[:1], dialect))
    assert not grammar.accepts(text_of(GOOD, dialect))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_strict_tools_hold_from_the_trigger_on(dialect):
    grammar = walk(dialect)
    assert grammar.accepts("Hello, <b>world</b>!")
    assert grammar.accepts("")
    assert grammar.accepts(text_of(GOOD, dialect))
    assert not grammar.accepts(text_of([("f", {"city": 1, "units": "C"})], dialect))
    if DIALECTS[dialect].trigger:
        assert grammar.accepts("Let me see. " + text_of(GOOD, dialect) + " Done.")
        assert not grammar.accepts("Let me see. " + DIALECTS[dialect].trigger + "x")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_code_is_text_beside_strict_tools(dialect):
    held = enforced(dialect, tools=TOOLS)
    assert held.grammar is not None
    assert held.form.dialect is not None
    for inside in ('print("hi")', '{"name": "f", "arguments": {"city": 1}}', "[f(city=1)]"):
        text = f"```json\n{inside}\n```"
        assert Walk(held.grammar).accepts(text)
        assert read(text, held.form.dialect) == ("", text, [], [])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_calls_or_an_answer_of_its_schema(dialect):
    answer = Grammar(kind="json_schema", text='{"type": "integer"}', param="response_format")
    both = walk(dialect, grammar=answer)
    assert both.accepts("42")
    assert both.accepts(text_of(GOOD, dialect))
    assert not both.accepts("Hello")


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [("regex", "a/b|c\\/d", "c/d", "a"), ("choice", '["ja", "n\\"o"]', 'n"o', "jan")],
)
def test_other_answers_beside_calls(kind, text, good, bad):
    both = walk("hermes", grammar=Grammar(kind=kind, text=text, param="guided"))
    assert both.accepts(good)
    assert not both.accepts(bad)


def test_markers_that_are_control_tokens_stand_for_their_tokens():
    markers = ["[TOOL_CALLS]"]
    ids = {text: 257 + at for at, text in enumerate(markers)}
    for mode in ("required", "auto"):
        grammar = enforced("mistral", ids, tools=TOOLS, tool_choice=ToolChoice(mode=mode)).grammar
        assert grammar is not None
        by_token = Walk(grammar, markers)
        assert by_token.accepts(text_of(GOOD, "mistral"))
        by_token.control = {}
        assert by_token.accepts(text_of(GOOD, "mistral")) == (mode == "auto")  # as plain text it is none


def test_without_strict_tools_nothing_is_enforced_unless_a_call_is_required():
    loose = (Tool(name="f", parameters=SCHEMA),)
    assert enforced("hermes", tools=loose).grammar is None
    assert enforced("hermes", tools=loose, tool_choice=REQUIRED).grammar is not None
    assert enforced(None).grammar is None


def test_a_tool_without_parameters_takes_none():
    grammar = enforced("hermes", tools=(Tool(name="f"),), tool_choice=REQUIRED).grammar
    assert grammar is not None
    assert Walk(grammar).accepts(text_of([("f", {})], "hermes"))
    assert not Walk(grammar).accepts(text_of([("f", {"a": 1})], "hermes"))


@pytest.mark.parametrize(
    ("dialect", "parameters", "match"),
    [
        ("hermes", {"type": "array"}, "no object"),
        ("pythonic", {"type": "object", "minProperties": 1}, "minProperties"),
        ("pythonic", {"type": "object", "properties": {"a b": {}}}, "a b"),
    ],
)
def test_tools_that_no_grammar_can_be_made_of(dialect, parameters, match):
    with pytest.raises(InvalidRequest, match=match) as caught:
        enforced(dialect, tools=(Tool(name="f", parameters=parameters, strict=True),))
    assert caught.value.param == "tools"


def test_a_grammar_that_cannot_stand_beside_calls_is_refused():
    with pytest.raises(InvalidRequest, match="guided_grammar"):
        enforced("hermes", tools=TOOLS, grammar=Grammar(kind="lark", text='start: "a"', param="guided_grammar"))


def tagged(**tags: Any) -> Walk:
    grammar = enforced(None, grammar=Grammar(kind="structural_tag", text=json.dumps(tags), param="p")).grammar
    assert grammar is not None
    return Walk(grammar)


def test_structural_tags():
    integer = {"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}
    string = {"begin": "<b=x>", "schema": {"type": "string"}, "end": "</b>"}
    grammar = tagged(structures=[integer, string], triggers=["<a>", "<b"])
    assert grammar.accepts("free <i>text</i>")
    assert grammar.accepts('so <a>12</a> and <b=x>"s"</b> bye')
    for wrong in ("<a>x</a>", "<b>", '<b=x>"a"</b><a>x</a>', "<a>1"):
        assert not grammar.accepts(wrong), wrong


@pytest.mark.parametrize(
    "tags",
    [
        {"structures": [], "triggers": []},
        {"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]},
        {"structures": [{"end": ""}], "triggers": ["<b"]},
        {"triggers": "x"},
    ],
)
def test_structural_tags_that_are_wrong(tags):
    with pytest.raises(InvalidRequest) as caught:
        tagged(**tags)
    assert caught.value.param == "p"


def test_choices_are_texts():
    grammar = enforced(None, grammar=Grammar(kind="choice", text='["a\\u007f\\"", "b\\n"]', param="p")).grammar
    assert grammar is not None
    assert Walk(grammar).accepts('a\x7f"')
    assert Walk(grammar).accepts("b\n")
    assert not Walk(grammar).accepts("a")


JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
ws     ::= | " " | "\n" [ \t]{0,20}  # optional
"""


def gbnf(text: str) -> Walk:
    grammar = enforced(None, grammar=Grammar(kind="gbnf", text=text, param="grammar")).grammar
    assert grammar is not None
    return Walk(grammar)


def test_gbnf():
    grammar = gbnf(JSON_GBNF)
    assert grammar.accepts('{"a": [true, "x\\n"]}')
    assert not grammar.accepts('{"a": [01]}')


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (r'root ::= [\u0041-\u0043\u4e00-\u9fff]+ "\\u0041\u0022"', ['AC中\\u0041"'], ['D\\u0041"', '\\u0041"']),
        ('root ::= "a" | root "b"', ["a", "ab", "abbb"], ["b", ""]),
        ('root ::= (a-b | "" ){2}\na-b ::= "x" # comment "\n', ["", "x", "xx"], ["xxx"]),
        ('root ::=\n  "a"\n  | "b" start\nstart ::= "c"', ["a", "bc"], ["b", "ac"]),
        (r"root ::= [^a\]\n/-]* [-+] [a-] .", ["bc+a\n", "--/"], ["a+a", "]-a", "+b"]),
        ('root ::= "1"{2,3} "2"{1} "3"{0,} T0\nT0 ::= "/"', ["112/", "111233/"], ["12/", "112"]),
        ('root ::= s\ns ::= "(" s ")" | ', ["", "(())"], ["(", "()("]),
    ],
)
def test_gbnf_as_people_write_it(text, good, bad):
    grammar = gbnf(text)
    for each in good:
        assert grammar.accepts(each), each
    for each in bad:
        assert not grammar.accepts(each), each


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('start ::= "a"', "root"),
        ("root ::= x", "'x'"),
        ('root ::= "a', "line 1"),
        ('root ::= "a"\nroot ::= "b"', "two rules"),
        ('"a" ::= "b"', "name ::="),
        ("", "name ::="),
        ("root ::= []", "empty"),
        (r'root ::= "\U00FFFFFF"', "no character"),
    ],
)
def test_gbnf_that_is_wrong(text, match):
    with pytest.raises(InvalidRequest, match=match) as caught:
        gbnf(text)
    assert caught.value.param == "grammar"


def test_thoughts_come_before_what_is_enforced():
    request = Request(
        id="r",
        model="m",
        messages=(Message(role="user", content="Hi"),),
        grammar=Grammar(kind="regex", text="a", param="p"),
    )
    form = Format(tags=KNOWN[0], is_open=True, budget=5)
    thinking = enforcement_of(request, form, lambda text: None).thinking
    assert thinking is not None
    assert (thinking.open, thinking.close, thinking.is_open, thinking.budget) == ("<think>", "</think>", True, 5)


def test_the_finished_text_is_held_against_the_whole_schema():
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string", "pattern": "(a+)+$"}}
    assert fault_of('["a", "b"]', schema) is None  # patterns are the grammar's
    assert "non-unique" in (fault_of('["a", "a"]', schema) or "")
    assert "JSON" in (fault_of('["a"', schema) or "")
    assert fault_of("1", True) is None
    assert fault_of('"x"', {"type": "string", "pattern": "y"}) is None
    assert fault_of('{"x": 1}', {"patternProperties": {"x": {"type": "string"}}}) is None
    assert fault_of("1", False) is not None
    assert "checked" in (fault_of("1", {"$ref": "http://127.0.0.1:1/never"}) or "")


def test_faults_of_answers_and_calls():
    answer = Grammar(kind="json_schema", text='{"uniqueItems": true}', param="p", is_strict=False)
    plain = enforced(None, grammar=answer)
    assert plain.faults("[1, 2]", []) == []
    assert len(plain.faults("[1, 1]", [])) == 1
    called = enforced("hermes", tools=TOOLS)
    assert called.faults("Hi", [("f", '{"city": "x", "units": "C"}')]) == []
    assert len(called.faults("", [("f", "{}"), ("a-b.c", '{"on": 1}')])) == 2


NUMBERS = [
    "0", "-0", "1", "-1", "01", "-01", "1.0", "1.5", "4.99", "5", "5.0", "5.000", "5.01", "5.7", "6", "-5", "-5.5",
    "-4.5", "-6", "10", "100", "0.5", "0.25", ".5", "5.", "1e1", "1E2", "-", "+1", "0.1", "-0.1", "12", "15", "9", "3",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize(
    "bounds",
    [
        {"maximum": 5}, {"minimum": -5}, {"exclusiveMaximum": 5}, {"exclusiveMinimum": -5},
        {"minimum": 0, "maximum": 5}, {"exclusiveMinimum": 0, "exclusiveMaximum": 5}, {"minimum": -5, "maximum": -1},
        {"minimum": 0.5, "maximum": 4.5},
    ],
)  # fmt: skip
def test_bounds_of_numbers_are_exact(kind, bounds):
    schema = {"type": kind, **bounds}
    grammar = Walk(Grammar(kind="json_schema", text=json.dumps(schema), param="p"))
    for text in NUMBERS:
        accepted = grammar.accepts(text)
        try:
            is_valid = fault_of(text, schema) is None
        except ValueError:
            is_valid = False
        assert accepted <= is_valid, text
        if is_valid and "e" not in text.lower() and not (kind == "integer" and "." in text):
            assert accepted or text == "-0", text  # an integer is written without fraction and exponent


STRINGS = [
    '""', '"a"', '"ab"', '"abc"', '"abcd"',
    '"🦙🦙🦙"', '"\\n\\"\\\\"', '"\\u00e9é"', '"a\n"', '"\\x"', '"\\ud83d\\ude00"',
]  # fmt: skip


@pytest.mark.parametrize("bounds", [{"minLength": 2}, {"maxLength": 3}, {"minLength": 1, "maxLength": 2}])
def test_bounds_of_strings_are_exact(bounds):
    schema = {"type": "string", **bounds}
    grammar = Walk(Grammar(kind="json_schema", text=json.dumps(schema), param="p"))
    for text in STRINGS:
        is_valid = fault_of(text, schema) is None
        assert grammar.accepts(text) <= is_valid, text
        if is_valid and "\\u" not in text:  # letters stand for themselves
            assert grammar.accepts(text), text


def test_properties_come_in_the_schemas_order_and_optional_ones_may_be_left_out():
    properties = {name: {"type": "integer"} for name in "cab"}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    grammar = Walk(Grammar(kind="json_schema", text=json.dumps(schema), param="p"))
    for good in ('{"a":1}', '{"c":1,"a":1}', '{"a":1, "b":1}', '{"c":1,"a":1,"b":1}'):
        assert grammar.accepts(good), good
    for bad in ("{}", '{"a":1,"c":1}', '{"b":1}', '{"a":1,}', '{"a":1,"a":1}', '{"a":1,"d":1}'):
        assert not grammar.accepts(bad), bad


def test_the_last_check_is_bounded_and_fetches_nothing():
    branches = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    schema = {"$defs": {**branches, "d40": {"type": "integer"}}, "$ref": "#/$defs/d0"}
    assert "too long" in (fault_of("1", schema) or "")
    assert fault_of("[" + "1, " * 3000 + "1]", {"items": {"type": "integer"}}) is None
    assert "checked" in (fault_of("1", {"minimum": "x"}) or "")
    objects = "[" + ", ".join(f'{{"a": {i}}}' for i in range(4000)) + "]"
    assert fault_of(objects, {"uniqueItems": True}) is None
    assert fault_of(objects, {"items": {"enum": [{"a": i} for i in range(4000)]}}) is None


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"uniqueItems": True},
            ['[1, true, "1", [1], {"a": 1}, null]', "[0, false]"],
            ["[1, 1.0]", '[{"a": 1}, {"a": 1}]'],
        ),
        ({"enum": [1, "x", {"a": [1]}]}, ["1", "1.0", '"x"', '{"a": [1.0]}'], ["true", "2", '{"a": [true]}']),
        ({"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]}, ['"a"', '"b"'], ["1"]),
        ({"patternProperties": {"^a": {}}, "additionalProperties": False}, ['{"a": 1}'], []),
    ],
)
def test_what_the_last_check_does_in_its_own_way(schema, good, bad):
    for text in good:
        assert fault_of(text, schema) is None, text
    for text in bad:
        assert fault_of(text, schema) is not None, text
