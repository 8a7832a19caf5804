"""Requests with grammars in the engine, over a toy model whose every token is one character."""

import itertools
import json

import msgspec
import pytest

from pelton.engine import constraints
from pelton.engine.engine import Engine
from pelton.engine.grammar_trial import GrammarTrial
from pelton.engine.protocol import Vocabulary
from pelton.request import Accepted, Done, EngineRequest, ErrorEvent, Finish, Grammar, Thinking

from .toy_executor import VOCAB, ToyExecutor, Transcript, digest, make_engine, prompt, request, run

CHARACTERS = '0123456789{}[]":, \nabcdefghijklmnopqrstuvwxyz.-eE'
END = VOCAB - 1
TOKENS = [character.encode() for character in CHARACTERS[:END]] + [b"<end>"]
LIST = {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 2, "maxItems": 3}


@pytest.fixture(autouse=True)
def no_trials(monkeypatch):
    """Grammars as simple as these need no process of their own to try them."""
    monkeypatch.setattr(GrammarTrial, "ends", lambda self, definition: True)


def engine_with_vocabulary(**settings: object) -> tuple[Engine, ToyExecutor]:
    engine, executor = make_engine(**settings)  # type: ignore[arg-type]
    engine.learn(Vocabulary(TOKENS, control_ids=[END], end_ids=[END]))
    return engine, executor


def constrained(id: str, schema: object, length: int = 20, **params: object) -> EngineRequest:
    plain = request(id, prompt(length, digest(id) % 7), **{"max_tokens": 60, "end_ids": (END,), **params})  # type: ignore[arg-type]
    grammar = Grammar(kind="json_schema", text=json.dumps(schema), param="response_format")
    return msgspec.structs.replace(plain, grammar=grammar)


def matching(id: str, pattern: str, length: int = 20, **params: object) -> EngineRequest:
    asked = constrained(id, LIST, length, **params)
    return msgspec.structs.replace(asked, grammar=Grammar(kind="regex", text=pattern, param="regex"))


def thinking(request: EngineRequest, budget: int | None, is_open: bool = True) -> EngineRequest:
    thoughts = Thinking(open="{{", close="}}", is_open=is_open, budget=budget)
    return msgspec.structs.replace(request, thinking=thoughts)


def text(transcript: Transcript, id: str, choice: int = 0) -> str:
    return "".join(CHARACTERS[token] for token in transcript.tokens(id, choice))


def reason(transcript: Transcript, id: str, choice: int = 0) -> str:
    return next(e.reason for e in transcript.events[id] if isinstance(e, Finish) and e.choice == choice)


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_is_of_the_schema_and_ends_when_nothing_may_follow(seed):
    engine, _ = engine_with_vocabulary()
    ran = run(engine, [constrained("a", LIST, temperature=1.0, seed=seed)])
    value = json.loads(text(ran, "a"))
    assert 2 <= len(value) <= 3
    assert all(isinstance(each, str) and len(each) <= 4 for each in value)
    assert reason(ran, "a") == "stop"


def test_choices_have_grammars_of_their_own():
    engine, _ = engine_with_vocabulary()
    ran = run(engine, [constrained("a", LIST, temperature=1.0, n=4)])
    answers = {text(ran, "a", choice) for choice in range(4)}
    assert len(answers) > 1
    assert all(2 <= len(json.loads(answer)) <= 3 for answer in answers)


def test_company_with_and_without_grammars_changes_nothing():
    alone = [run(engine_with_vocabulary()[0], [each]) for each in company()]
    engine, _ = engine_with_vocabulary()
    together = run(engine, company())
    for each, lone in zip(company(), alone, strict=True):
        assert together.answers(each.id) == lone.answers(each.id)


def company() -> list[EngineRequest]:
    return [
        request("plain", prompt(30), temperature=1.0, max_tokens=40),
        constrained("list", LIST, temperature=1.0),
        request("greedy", prompt(70), max_tokens=30),
        constrained("object", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, n=2),
    ]


def test_a_preempted_answer_goes_on_where_it_was():
    long = {"type": "string", "minLength": 80, "maxLength": 90}
    requests = [constrained(str(i), long, 60, temperature=1.0, max_tokens=120) for i in range(4)]
    free = run(engine_with_vocabulary()[0], requests)
    engine, _ = engine_with_vocabulary(num_blocks=11)
    tight = run(engine, requests)
    assert engine.counters.preempted
    for i in range(4):
        assert tight.answers(str(i)) == free.answers(str(i))


def test_an_answer_that_is_cut_says_length_and_a_complete_one_stop():
    full = run(engine_with_vocabulary()[0], [constrained("a", LIST)])
    num_tokens = len(full.tokens("a"))
    exact = run(engine_with_vocabulary()[0], [constrained("a", LIST, max_tokens=num_tokens)])
    assert reason(exact, "a") == "stop"
    cut = run(engine_with_vocabulary()[0], [constrained("a", LIST, max_tokens=num_tokens - 1)])
    assert reason(cut, "a") == "length"
    assert text(cut, "a") == text(full, "a")[:-1]


def test_the_end_of_a_turn_ends_what_could_go_on():
    engine, _ = engine_with_vocabulary()
    bias = {END: 100.0, **{token: -100.0 for token in range(END) if CHARACTERS[token] not in "123"}}
    for ignore_eos in (False, True):
        ran = run(engine, [constrained(f"{ignore_eos}", {"type": "integer"}, ignore_eos=ignore_eos, logit_bias=bias)])
        assert reason(ran, f"{ignore_eos}") == "stop"


def test_a_schema_that_cannot_be_enforced_is_refused_before_anything_is_accepted():
    engine, _ = engine_with_vocabulary()
    ran = run(engine, [constrained("a", {"type": "array", "uniqueItems": True}), constrained("b", LIST)])
    (refusal,) = ran.events["a"]
    assert isinstance(refusal, ErrorEvent)
    assert refusal.kind == "InvalidRequest"
    assert refusal.param == "response_format"
    assert "uniqueItems" in refusal.message
    assert isinstance(ran.events["b"][0], Accepted)
    assert isinstance(ran.last("b"), Done)


def test_a_grammar_before_the_vocabulary_fails_alone():
    engine, _ = make_engine()
    ran = run(engine, [constrained("a", LIST), request("b", prompt(5))])
    (refusal,) = ran.events["a"]
    assert isinstance(refusal, ErrorEvent)
    assert isinstance(ran.last("b"), Done)


@pytest.mark.parametrize("choice", [None, 0, 1])
def test_abort_while_the_grammar_is_compiled(choice):
    engine, _ = engine_with_vocabulary()
    engine.submit(constrained("a", LIST, n=3))
    engine.abort("a", choice)
    ran = run(engine)
    assert [event for event in ran.events["a"] if isinstance(event, Accepted)] == [ran.events["a"][0]]
    assert [e.choice for e in ran.events["a"] if isinstance(e, Finish) and e.reason == "abort"] == (
        [0, 1, 2] if choice is None else [choice]
    )
    assert isinstance(ran.last("a"), Done)


@pytest.mark.parametrize("bound", ["MAX_COMPILING", "MAX_OF_TENANT"])
def test_grammars_that_wait_to_be_compiled_are_bounded(monkeypatch, bound):
    monkeypatch.setattr(constraints, bound, 0)
    engine, _ = engine_with_vocabulary()
    ran = run(engine, [constrained("a", LIST), request("b", prompt(5))])
    (refusal,) = ran.events["a"]
    assert isinstance(refusal, ErrorEvent)
    assert refusal.kind == "Overloaded"
    assert isinstance(ran.last("b"), Done)


def test_a_tenants_grammars_leave_room_for_those_of_others(monkeypatch):
    monkeypatch.setattr(constraints, "MAX_OF_TENANT", 2)
    engine, _ = engine_with_vocabulary()
    asked = [msgspec.structs.replace(constrained(id, LIST), tenant=id[0]) for id in ("a1", "a2", "a3", "b1")]
    ran = run(engine, asked)
    assert [isinstance(ran.last(one.id), Done) for one in asked] == [True, True, False, True]


def test_work_is_announced_when_a_grammar_is_ready():
    import threading

    engine, _ = engine_with_vocabulary()
    called = threading.Event()
    engine.on_news = called.set
    engine.submit(constrained("a", LIST))
    assert called.wait(30)
    assert engine.has_work
    run(engine)


def test_allowed_tokens_and_a_grammar_hold_together():
    engine, _ = engine_with_vocabulary()
    allowed = tuple(CHARACTERS.index(character) for character in '[]",ab')
    params = {"temperature": 1.0, "allowed_token_ids": allowed}
    ran = run(
        engine,
        [
            constrained("both", LIST, **params),
            constrained("grammar", LIST, temperature=1.0),
            request("allowed", prompt(9), **params),
        ],
    )
    assert set(text(ran, "both")) <= set('[]",ab')
    assert 2 <= len(json.loads(text(ran, "both"))) <= 3
    assert 2 <= len(json.loads(text(ran, "grammar"))) <= 3
    assert set(ran.tokens("allowed")) <= set(allowed)


@pytest.mark.parametrize("windows", [(None,), (1,), (2,)])
def test_drafts_change_nothing(windows):
    asked = [
        *company(),
        constrained("items", {"type": "array", "items": {"type": "integer"}, "minItems": 30}, max_tokens=120),
        constrained("text", {"type": "string", "minLength": 60, "maxLength": 70}, max_tokens=120, n=2),
        constrained("cut", {"type": "string", "minLength": 60}, max_tokens=40, logprobs=2),
        thinking(constrained("thought", LIST, max_tokens=120, n=2), budget=60),
        thinking(request("free", prompt(30), max_tokens=120, end_ids=(END,)), budget=50),
        matching("forced", "the name of it is [a-z]{3,5}, and that of the other is [a-z]{3,5}-the end", logprobs=3),
        matching("choices", "(one two three|one two four) five six [0-9]{1,3}", n=3, temperature=0.8, seed=5),
        matching("penalized", "a long beginning: ([0-9]-){5}and its end", repetition_penalty=1.3, temperature=0.8),
        matching("ends in it", "abcdefghij", stop_token_ids=(CHARACTERS.index("g"),)),
        matching("cut in it", "abcdefghij", max_tokens=5),
        matching("may end", "abc(def)?", n=2, temperature=0.8),
    ]
    expected = run(engine_with_vocabulary(windows=windows, speculation="off")[0], asked)
    engine, _ = engine_with_vocabulary(windows=windows, clock=map(float, itertools.count()).__next__)
    drafted = run(engine, asked)
    for one in asked:
        assert drafted.answers(one.id) == expected.answers(one.id), one.id
        assert drafted.last(one.id).usage.completion_tokens == expected.last(one.id).usage.completion_tokens
    assert engine.counters.accepted > 0


def test_a_forced_answer_takes_few_steps_and_none_of_its_tokens_is_guessed_wrongly():
    asked = matching("a", "all of this answer is known before its first token", max_tokens=60)
    plain, plain_executor = engine_with_vocabulary(speculation="off")
    expected = run(plain, [asked])
    engine, executor = engine_with_vocabulary(clock=map(float, itertools.count()).__next__)
    drafted = run(engine, [asked])
    assert drafted.answers("a") == expected.answers("a")
    assert text(drafted, "a") == "all of this answer is known before its first token"
    assert reason(drafted, "a") == "stop"
    assert engine.counters.accepted == engine.counters.drafted > 25
    assert len(executor.steps) < len(plain_executor.steps) / 2
    assert plain.counters.drafted == 0


def test_a_grammar_that_breaks_breaks_with_drafts_as_without(monkeypatch):
    """The third token of a run is one too many."""
    accept = constraints.GrammarConstraint.accept

    def breaking(self, token):
        accept(self, token)
        self.num_accepted = getattr(self, "num_accepted", 0) + 1

    def fork(self):
        other = constraints.GrammarConstraint(self._matcher.deep_copy(), self.warnings)
        other.num_accepted = getattr(self, "num_accepted", 0)
        return other

    def error(self):
        return constraints.InvalidRequest("it broke") if getattr(self, "num_accepted", 0) > 2 else None

    monkeypatch.setattr(constraints.GrammarConstraint, "accept", breaking)
    monkeypatch.setattr(constraints.GrammarConstraint, "fork", fork)
    monkeypatch.setattr(constraints.GrammarConstraint, "error", property(error))
    asked = matching("a", "abcdefghij", max_tokens=60)
    clock = map(float, itertools.count()).__next__
    ran = [run(engine_with_vocabulary(**each)[0], [asked]) for each in ({"speculation": "off"}, {"clock": clock})]
    assert ran[0].answers("a") == ran[1].answers("a")
    assert all(isinstance(each.last("a"), ErrorEvent) for each in ran)
    assert "it broke" in ran[1].last("a").message


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_thoughts_end_with_their_budget_and_the_answer_is_of_its_schema(budget):
    engine, _ = engine_with_vocabulary()
    ran = run(engine, [thinking(constrained("a", LIST, temperature=1.0, n=3), budget)])
    for choice in range(3):
        thought, _, answer = text(ran, "a", choice).partition("}}")
        assert len(thought.removesuffix("\n")) <= budget
        assert 2 <= len(json.loads(answer)) <= 3
        assert reason(ran, "a", choice) == "stop"


def test_a_budget_without_a_grammar_leaves_the_answer_free():
    engine, _ = engine_with_vocabulary()
    plain = request("a", prompt(30), max_tokens=60, temperature=1.0)
    ran = run(engine, [thinking(plain, 5), msgspec.structs.replace(plain, id="b"), thinking(request("c", [3]), 0)])
    thought, close, answer = text(ran, "a").partition("}}")
    assert len(thought.removesuffix("\n")) <= 5
    assert close
    assert len(answer) == 60 - len(thought) - 2
    assert text(ran, "a")[:5] == text(ran, "b")[:5]
    assert text(ran, "c").startswith("}}")


def test_what_is_not_enforced_is_told_with_the_acceptance():
    engine, _ = engine_with_vocabulary()
    asked = constrained("a", {**LIST, "uniqueItems": True})
    assert asked.grammar is not None
    loose = msgspec.structs.replace(asked, grammar=msgspec.structs.replace(asked.grammar, is_strict=False))
    for _ in range(2):  # compiled, and known
        ran = run(engine, [loose])
        (accepted,) = (event for event in ran.events["a"] if isinstance(event, Accepted))
        assert len(accepted.warnings) == 1
        assert "uniqueItems" in accepted.warnings[0]
