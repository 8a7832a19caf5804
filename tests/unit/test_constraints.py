import json
import random
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from llguidance import LLMatcher

from pelton.engine.batch import Row
from pelton.engine.constraints import Constraint, Grammars
from pelton.engine.grammar_trial import LIMITS, GrammarTrial
from pelton.engine.protocol import Vocabulary
from pelton.errors import InternalError, InvalidRequest, PeltonError
from pelton.request import Grammar

END = 256
"""The vocabulary: every byte, two ends of a turn, a control token, and some longer tokens."""
LONGER = [b'{"', b'":', b'": ', b"true", b"  ", b"\n  ", b'"}', b"12"]
TOKENS = [*(bytes([byte]) for byte in range(256)), b"<end>", b"<turn>", b"<tool>", *LONGER]
VOCAB = len(TOKENS) + 7  # the output matrix may have more rows than there are tokens


@pytest.fixture(scope="module")
def grammars():
    grammars = Grammars(VOCAB)
    grammars.learn(Vocabulary(TOKENS, control_ids=[256, 257, 258], end_ids=[256, 257]))
    yield grammars
    grammars.close()


def made(grammars: Grammars, kind: str, text: str, param: str = "response_format") -> Constraint:
    grammars.compile("id", Grammar(kind=kind, text=text, param=param))  # type: ignore[arg-type]
    while not grammars.is_ready:
        time.sleep(0.001)
    ((id, result),) = grammars.take()
    assert id == "id"
    assert not grammars.num_compiling
    if isinstance(result, PeltonError):
        raise result
    return result


def schema(grammars: Grammars, schema: object) -> Constraint:
    return made(grammars, "json_schema", json.dumps(schema))


def allowed(grammars: Grammars, constraint: Constraint, drafts: Sequence[int] = ()) -> list[set[int]]:
    sequence = SimpleNamespace(constraint=constraint, draft=list(drafts))
    started = grammars.start_masks([Row(sequence, offset) for offset in range(1 + len(drafts))])  # type: ignore[arg-type]
    assert started is not None
    masks = started.result(timeout=30)
    assert masks.shape == (1 + len(drafts), -(-VOCAB // 32))
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def follow(grammars: Grammars, constraint: Constraint, text: bytes) -> bool:
    """Does the grammar allow this text, byte by byte?"""
    for byte in text:
        if byte not in allowed(grammars, constraint)[0]:
            return False
        constraint.accept(byte)
        assert constraint.error is None
    return True


OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "text",
    [
        b'{"name":"x"}',
        b'{"name": "Zo\xc3\xab \\"\\n", "age": 150}',
        b'{\n  "name": "x",\n  "age": 0\n}',
    ],
)
def test_what_the_schema_allows_can_be_written_and_only_then_the_end(grammars, text):
    constraint = schema(grammars, OBJECT)
    for i, byte in enumerate(text):
        now = allowed(grammars, constraint)[0]
        assert byte in now, (i, text[:i])
        assert not now & {256, 257, 258}
        constraint.accept(byte)
    assert constraint.is_finished
    assert allowed(grammars, constraint)[0] == {256, 257}


@pytest.mark.parametrize(
    "text", [b'{"age"', b'{"name":1', b'{"name":"x","age":151}', b'{"name":"x","age":1.5', b"[", b'{"other"', b" {"]
)
def test_what_the_schema_forbids_cannot_be_written(grammars, text):
    assert not follow(grammars, schema(grammars, OBJECT), text)


@pytest.mark.parametrize("text", [b'{  "', b'{\n\n"', b'{ \n"', b'{"name"  :', b"{" + b"\n" + b" " * 41])
def test_white_space_cannot_run_away(grammars, text):
    assert not follow(grammars, schema(grammars, OBJECT), text)


def test_all_ends_of_a_turn_are_allowed_where_the_text_is_complete_but_may_go_on(grammars):
    constraint = schema(grammars, {"type": "integer"})
    assert not allowed(grammars, constraint)[0] & {256, 257}
    constraint.accept(ord("4"))
    assert not constraint.is_finished
    assert allowed(grammars, constraint)[0] >= {256, 257, ord("2")}


def test_strings_are_counted_in_characters(grammars):
    three = {"type": "string", "minLength": 3, "maxLength": 3}
    assert follow(grammars, schema(grammars, three), '"🦙🦙🦙"'.encode())
    assert follow(grammars, schema(grammars, three), b'"\\n\\"\\\\"')
    assert not follow(grammars, schema(grammars, three), '"🦙🦙🦙🦙'.encode())


def test_drafts_are_masked_one_after_the_other_and_taken_back(grammars):
    constraint = schema(grammars, OBJECT)
    drafts = list(b'{"name"')
    rows = allowed(grammars, constraint, drafts)
    alone = []
    other = constraint.fork()
    for token in [*drafts, None]:
        alone += allowed(grammars, other)
        if token is not None:
            other.accept(token)
    assert rows == alone
    assert allowed(grammars, constraint)[0] == alone[0]


def test_drafts_are_checked_without_moving(grammars):
    constraint = schema(grammars, OBJECT)
    assert constraint.check(list(b'{"name":"x"}')) == 12
    assert constraint.check(list(b'{"nome"')) == 3
    assert constraint.check([END]) == 0
    assert constraint.check([]) == 0
    assert follow(grammars, constraint, b'{"name":"x"}')


def test_forks_stand_alone(grammars):
    one = schema(grammars, {"enum": ["aa", "ab"]})
    assert follow(grammars, one, b'"a')
    two = one.fork()
    one.accept(ord("a"))
    assert allowed(grammars, two)[0] & {ord("a"), ord("b")} == {ord("a"), ord("b")}


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "string"}}, "contains"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "string", "format": "colour"}, "colour"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}, "oneOf"),
        ({"type": "text"}, "text"),
        ({"$ref": "file:///etc/passwd"}, "etc/passwd"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "not"),
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_refused_by_its_name(grammars, wrong, names):
    with pytest.raises(InvalidRequest, match=names) as caught:
        schema(grammars, wrong)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("text", ["{", "", "[1]", '{"type": "object"', "[" * 5000])
def test_a_schema_that_is_none_is_refused(grammars, text):
    with pytest.raises(InvalidRequest):
        made(grammars, "json_schema", text, "response_format")


def test_a_regular_expression_and_a_grammar(grammars):
    regex = made(grammars, "regex", "(yes|no)!?", "regex")
    assert follow(grammars, regex, b"yes")
    assert allowed(grammars, regex)[0] == {256, 257, ord("!")}
    lark = made(grammars, "lark", 'start: "a" start | "b"', "grammar")
    assert follow(grammars, lark, b"aab")
    assert lark.is_finished
    with pytest.raises(InvalidRequest, match="grammar"):
        made(grammars, "lark", "start: nothing", "grammar")


def test_a_long_forced_beginning_costs_nothing(grammars):
    regex = made(grammars, "regex", "a{100000}b", "regex")
    assert allowed(grammars, regex)[0] == {ord("a")}


def test_grammars_are_kept_and_a_new_vocabulary_makes_them_anew():
    grammars = Grammars(VOCAB)
    try:
        grammars.learn(Vocabulary(TOKENS, control_ids=[], end_ids=[256]))
        assert follow(grammars, schema(grammars, OBJECT), b"{")
        grammars.learn(Vocabulary(TOKENS, control_ids=[], end_ids=[257]))
        done = schema(grammars, {"type": "null"})
        assert follow(grammars, done, b"null")
        assert allowed(grammars, done)[0] == {257}
    finally:
        grammars.close()


def test_what_nobody_waits_for_is_not_compiled():
    grammars = Grammars(VOCAB)
    grammars.learn(Vocabulary(TOKENS, control_ids=[256, 257, 258], end_ids=[256, 257]))
    begun, go_on = threading.Event(), threading.Event()
    compiled: list[str] = []

    def compile(grammar: Grammar, thinking: object) -> None:
        begun.set()
        go_on.wait(30)
        compiled.append(grammar.text)

    grammars._compile = compile  # type: ignore[assignment, method-assign]
    for name in ("first", "left", "last"):
        grammars.compile(name, Grammar(kind="regex", text=name, param="response_format"))
        assert begun.wait(30)
    grammars.forget("left")
    go_on.set()
    while len(grammars.take()) < 2 and grammars.num_compiling:
        time.sleep(0.001)
    assert compiled == ["first", "last"]
    grammars.close()


def test_a_grammar_that_takes_for_ever_is_refused_and_the_next_is_compiled(monkeypatch):
    monkeypatch.setattr(GrammarTrial.__init__, "__defaults__", (LIMITS._replace(cpu_seconds=0.3),))
    grammars = Grammars(VOCAB)
    grammars.learn(Vocabulary(TOKENS, control_ids=[256, 257, 258], end_ids=[256, 257]))
    patterns = [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuvwxyz"]
    with pytest.raises(InvalidRequest, match="too complex"):
        schema(grammars, {"allOf": patterns})
    assert follow(grammars, schema(grammars, {"type": "integer"}), b"12")
    monkeypatch.setattr(grammars._trial, "ends", None)  # it is known now
    with pytest.raises(InvalidRequest, match="too complex"):
        schema(grammars, {"allOf": patterns})
    grammars.close()


def test_a_grammar_that_is_nested_too_deep_is_refused(grammars):
    chain = "".join(f'T{i}: "a" T{i + 1} | "b"\n' for i in range(5000))
    with pytest.raises(InvalidRequest, match="too complex"):
        made(grammars, "lark", f'start: T0\n{chain}T5000: "z"\n')
    assert follow(grammars, schema(grammars, {"type": "integer"}), b"12")


def test_a_trial_whose_process_is_killed_is_no_verdict():
    trial = GrammarTrial()
    definition = LLMatcher.grammar_from_regex("a+")
    assert trial.ends(definition)
    assert trial._child._child is not None
    trial._child._child.kill()
    with pytest.raises(InternalError, match="exit status -9"):
        trial.ends(definition)
    assert trial.ends(definition)
    trial.close()
    with pytest.raises(InternalError):
        trial.ends(definition)


@pytest.mark.parametrize("impossible", [{"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}])
def test_a_schema_that_no_text_fulfils_is_refused(grammars, impossible):
    with pytest.raises(InvalidRequest, match="no text fulfils it"):
        schema(grammars, impossible)


FORCING = [
    ("json_schema", json.dumps(OBJECT)),
    ("json_schema", json.dumps({"enum": ["engine", "energy", "energetic"]})),
    ("regex", r"The name is [A-Z][a-z]{2,5}, and the number (is|was) [0-9]+\."),
    ("lark", 'start: "a" ("true" | "tree") <[258]> " and no more"\n'),
]


@pytest.mark.parametrize(("kind", "text"), FORCING)
@pytest.mark.parametrize("seed", range(3))
def test_masks_leave_forced_tokens_alone_and_asking_for_them_changes_nothing(grammars, kind, text, seed):
    draw, constraint = random.Random(seed), made(grammars, kind, text)
    unasked = constraint.fork()
    num_forced = 0
    for _ in range(200):
        if constraint.is_finished:
            break
        forced, begun = constraint.forced(), constraint.begun()
        may = allowed(grammars, constraint)[0]
        assert may == allowed(grammars, unasked)[0]
        assert constraint.check(forced) == len(forced)
        if forced:
            num_forced += 1
            assert may == {forced[0]}
            *_, behind = allowed(grammars, constraint, forced)
            assert behind
        if begun and not may & {256, 257, 258}:
            assert all(begun.startswith(TOKENS[token]) or TOKENS[token].startswith(begun) for token in may)
        # Letters before everything, so that strings end.
        token = draw.choice(sorted(may & {*b'"}.', 256} or may))
        for each in (constraint, unasked):
            each.accept(token)
            assert each.error is None
    assert num_forced
