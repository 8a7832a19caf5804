"""Every dialect of tool calls: what is written is read back, however it is cut, and nothing else is a call."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.text.output import Format, OutputParser
from pelton.text.reasoning import KNOWN
from pelton.text.tools.detect import DIALECTS
from pelton.text.tools.dialect import Dialect
from pelton.text.tools.json_text import JSONText
from pelton.text.tools.layout import Layout
from pelton.text.tools.reader import Arguments, Begin, End, Piece, Text

NAMES = ("f", "get_weather", "a-b.c")
Call = tuple[str, str]


def read(
    text: str, dialect: str | Dialect, cuts: list[int] | None = None, **form: Any
) -> tuple[str, str, list[Call], list[str]]:
    """(thoughts, answer, calls, warnings); every call has ended."""
    dialect = DIALECTS[dialect] if isinstance(dialect, str) else dialect
    parser = OutputParser(Format(dialect=dialect, names=NAMES, **form))
    pieces: list[Piece] = []
    edges = [0, *sorted(cuts or []), len(text)]
    for start, end in itertools.pairwise(edges):
        pieces += parser.feed(text[start:end])
    pieces += parser.finish()
    said = ["", ""]
    calls: list[list[str]] = []
    is_open = False
    for piece in pieces:
        match piece:
            case Text(text, is_reasoning):
                assert text
                said[not is_reasoning] += text
            case Begin(name):
                assert not is_open
                is_open = True
                calls.append([name, ""])
            case Arguments(text):
                assert is_open
                calls[-1][1] += text
            case End():
                assert is_open
                is_open = False
    assert not is_open
    return said[0], said[1], [(name, arguments) for name, arguments in calls], list(parser.warnings)


def written(calls: list[tuple[str, dict[str, Any]]], layout: Layout) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        if layout.is_python:
            return layout.opened(name) + ", ".join(f"{k}={v!r}" for k, v in arguments.items()) + layout.closing
        return layout.opened(name) + json.dumps(arguments, ensure_ascii=False) + layout.closing

    return layout.head + layout.between.join(call(*each) for each in calls) + layout.tail


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet=st.characters(exclude_categories=("Cs",)))
    | st.sampled_from(["</tool_call>", '"}', "[TOOL_CALLS]", "'", "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
KEYS = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3)


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=30, deadline=None)
@given(CALLS, st.data())
def test_what_is_written_is_read_back_however_it_is_cut(dialect, calls, data):
    text = written(calls, DIALECTS[dialect].layout)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    thoughts, said, found, warnings = read(text, dialect, cuts)
    assert (thoughts, said, warnings) == ("", "", [])
    assert [name for name, _ in found] == [name for name, _ in calls]
    assert [json.loads(arguments) for _, arguments in found] == [arguments for _, arguments in calls]
    assert read(text, dialect) == (thoughts, said, found, warnings)


PARTS = [
    "Hi", " ", "\n", "{", "}", "[", "]", '"', ":", ",", '{"name": "f", "arguments": {"a": 1}}', "<", "<tool", "{}",
    '"name"', '"f"', '"arguments"', "f(", "a=1", ")", "'", "```json\n", "```", "function", "é🦙", "\\", "[ARGS]",
    "<think>", "</think>", *(marker for each in DIALECTS.values() for marker in each.markers),
]  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=75, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.booleans(), st.data())
def test_any_text_gives_the_same_however_it_is_cut(dialect, text, is_open, data):
    form = {"tags": KNOWN[0], "is_open": is_open}
    whole = read(text, dialect, **form)
    assert read(text, dialect, list(range(1, len(text))), **form) == whole
    assert read(text, dialect, data.draw(st.lists(st.integers(0, len(text)), max_size=6)), **form) == whole
    thoughts, said, calls, _ = whole
    if not calls and not thoughts and "<think>" not in text and not is_open:
        assert said == text.rstrip() or said == text  # nothing is lost


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("json", '{"name": "Bob", "age": 3}'),
        ("json", '{"answer": 42}'),
        ("json", '{"name": "f"}'),
        ("json", "[1, 2]"),
        ("json", '```json\n{"a": 1}\n```'),
        ("json", 'Use {"name": "f", "arguments": {}} for it.'),
        ("llama3", '{"name": "f", "age": {}}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[see f(x) below]"),
        ("pythonic", "f(a=1)"),
        ("hermes", 'Write <tool_call and {"name": "f"}'),
        ("mistral", '[{"name": "f", "arguments": {}}]'),
        ("deepseek", "<｜tool▁calls▁begin"),
    ],
)
def test_what_resembles_a_call_stays_text_without_a_warning(dialect, text):
    assert read(text, dialect) == ("", text, [], [])


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("hermes", "<tool_call>f()</tool_call>"),
        ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "f"}</tool_call>'),
        ("mistral", "[TOOL_CALLS]what is this"),
        ("mistral", "[TOOL_CALLS]nobody[ARGS]{}"),
        ("deepseek", "<｜tool▁call▁begin｜>nobody<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ],
)
def test_a_malformed_call_is_text_with_a_warning(dialect, text):
    thoughts, said, calls, warnings = read(text, dialect)
    assert (thoughts, said, calls, len(warnings)) == ("", text, [], 1)


@pytest.mark.parametrize(
    ("dialect", "text", "said", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": x}}', "x}}", '{"a": '),
        ("mistral-named", '[TOOL_CALLS]f[ARGS]{"a": x}', "x}", '{"a": '),
        ("pythonic", "[f(a=1, b=x y)]", ", b=x y)]", '{"a": 1'),
    ],
)
def test_a_call_that_breaks_in_its_arguments_has_ended_and_the_rest_is_text(dialect, text, said, arguments):
    _, rest, calls, warnings = read(text, dialect)
    assert (rest.strip(), calls, len(warnings)) == (said.strip(), [("f", arguments)], 1)


@pytest.mark.parametrize(
    ("dialect", "text", "said", "calls"),
    [
        ("hermes", 'Yes.\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>  Bye', "Yes.\nBye",
         [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f"}\n{"name": "a-b.c"}</tool_call>', "", [("f", "{}"), ("a-b.c", "{}")]),
        ("hermes", '{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ("hermes", '```json\n{"name": "f", "arguments": {}}\n```', "", [("f", "{}")]),
        ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("llama3", 'Let me see.<|python_tag|>{"name": "f", "parameters": {}}', "Let me see.", [("f", "{}")]),
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', "", [("f", "{}")] * 2),
        ("json", '```json\n[{"name": "f", "arguments": {}}]\n```', "", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]', "", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}[TOOL_CALLS]f{}', "", [("f", '{"a": 1}'), ("f", "{}")]),
        ("deepseek-fenced", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```"
         "<｜tool▁call▁end｜>\n<｜tool▁calls▁end｜>", "", [("f", "{}")]),
        ("pythonic", "<|python_start|>[f(a=True, b='x', c=[1, None])]<|python_end|>", "",
         [("f", '{"a": true, "b": "x", "c": [1, null]}')]),
        ("pythonic", '[get_weather(city="Oslo (NO)", days=null)]', "",
         [("get_weather", '{"city": "Oslo (NO)", "days": null}')]),
    ],
)  # fmt: skip
def test_calls_as_models_write_them(dialect, text, said, calls):
    assert read(text, dialect) == ("", said, calls, [])


def test_where_calls_are_enforced_only_marked_ones_are_read():
    parser = OutputParser(Format(dialect=DIALECTS["hermes"].enforced(), names=NAMES))
    text = '{"name": "f", "arguments": {}}'
    assert parser.feed(text) == [Text(text)]


def test_arguments_stream_while_they_are_written():
    parser = OutputParser(Format(dialect=DIALECTS["hermes"], names=NAMES))
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": "x') == [Begin("f"), Arguments('{"a": "x')]
    assert parser.feed("y") == [Arguments("y")]
    assert parser.feed('"}') == [Arguments('"}')]
    assert parser.feed("}") == [End()]


def test_ids_are_what_templates_take():
    assert all(len(DIALECTS["mistral"].call_id()) == 9 for _ in range(5))
    assert DIALECTS["mistral"].call_id().isalnum()
    assert len({DIALECTS["hermes"].call_id() for _ in range(5)}) == 5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)


@settings(max_examples=200, deadline=None)
@given(JSON, st.sampled_from([None, 1]), st.booleans())
def test_json_is_followed_to_its_end(value, indent, ascii):
    text = JSONText()
    for character in json.dumps(value, indent=indent, ensure_ascii=ascii):
        assert text.step(character)
    assert text.is_complete


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='{}[]",:\\ue0123-+.tfalsrn \n', max_size=14))
def test_json_is_what_python_says_it_is(given):
    text = JSONText()
    is_json = all(text.step(character) for character in given) and text.is_complete
    try:
        json.loads(given)
        expected = given == given.rstrip()  # white space behind it is not taken
    except ValueError:
        expected = False
    assert is_json == expected
