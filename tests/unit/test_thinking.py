"""The constraint of thoughts: its budget, its end, and the grammar of the answer behind it."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest

from pelton.engine.constraints import Constraint, Grammars
from pelton.engine.grammar_trial import GrammarTrial
from pelton.engine.protocol import Vocabulary
from pelton.errors import PeltonError
from pelton.request import Grammar, Thinking

END = 256
WHOLE = [b"<think>", b"</think>"]
PIECES = [b"</", b"think", b">", b"\n\n", b'>{"', b"ab"]
VOCABULARIES = {
    "tags are tokens": [*(bytes([byte]) for byte in range(256)), b"<end>", *WHOLE, *PIECES],
    "tags are spelt": [*(bytes([byte]) for byte in range(256)), b"<end>", *PIECES],
}
DIGIT = Grammar(kind="regex", text="[0-9]", param="response_format")


@pytest.fixture(autouse=True)
def no_trials(monkeypatch):
    monkeypatch.setattr(GrammarTrial, "ends", lambda self, definition: True)


class Text:
    """A text under a constraint, over one of the vocabularies."""

    def __init__(
        self, vocabulary: str, grammar: Grammar | None = None, is_open: bool = True, budget: int | None = None
    ):
        self.tokens = VOCABULARIES[vocabulary]
        self.size = len(self.tokens)
        grammars = Grammars(self.size)
        grammars.learn(Vocabulary(self.tokens, control_ids=[END], end_ids=[END]))
        grammars.compile("r", grammar, Thinking(open="<think>", close="</think>", is_open=is_open, budget=budget))
        while not grammars.is_ready:
            time.sleep(0.001)
        ((_, made),) = grammars.take()
        grammars.close()
        assert not isinstance(made, PeltonError), made
        self.constraint: Constraint = made.fork()
        self.text = b""

    def rows(self, drafts: list[int] = []) -> list[set[int]]:  # noqa: B006
        masks = np.zeros((1 + len(drafts), -(-self.size // 32)), np.uint32)
        self.constraint.fill(masks, drafts)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : self.size]
        return [set(np.flatnonzero(row).tolist()) for row in bits]

    def allowed(self) -> set[int]:
        return self.rows()[0]

    def say(self, *texts: bytes) -> Text:
        for text in texts:
            id = self.tokens.index(text)
            assert id in self.allowed(), (self.text, text)
            self.constraint.accept(id)
            self.text += text
        return self

    def forced(self) -> bytes:
        """What is said where nothing else may be."""
        said = b""
        while len(allowed := self.allowed()) == 1:
            (id,) = allowed
            self.constraint.accept(id)
            said += self.tokens[id]
        return said


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(("budget", "closing"), [(0, b"</think>"), (1, b"\n</think>"), (3, b"\n</think>")])
def test_thoughts_are_closed_when_the_budget_is_used_up(vocabulary, budget, closing):
    text = Text(vocabulary, budget=budget)
    text.say(*[b"ab"] * budget)
    assert text.forced() == closing
    assert len(text.allowed()) == text.size  # the answer is free
    assert not text.constraint.is_finished


def test_the_tags_own_token_is_taken():
    text = Text("tags are tokens", budget=1).say(b"a")
    assert text.allowed() == {text.tokens.index(b"\n")}
    text.say(b"\n")
    assert text.allowed() == {text.tokens.index(b"</think>")}


def test_a_tag_that_is_half_written_is_completed():
    text = Text("tags are spelt", budget=2).say(b"a", b"</")
    assert text.forced() == b"think>"
    assert len(text.allowed()) == text.size


def test_a_character_is_not_cut():
    first, second, third, fourth = (bytes([byte]) for byte in "🦙".encode())
    text = Text("tags are tokens", budget=2).say(b"a", first)
    assert len(text.allowed()) == text.size
    text.say(second, third, fourth)
    assert text.forced() == b"\n</think>"


def test_a_model_that_ends_its_thoughts_itself_is_left_alone():
    text = Text("tags are tokens", budget=5).say(b"a", b"</think>")
    assert len(text.allowed()) == text.size
    text.say(*[b"a"] * 10)
    assert len(text.allowed()) == text.size


@pytest.mark.parametrize("start", [b"", b"\n"])
def test_thoughts_that_the_model_opens_have_a_budget_too(start):
    text = Text("tags are spelt", is_open=False, budget=1)
    text.say(*([start] if start else []), b"<", b"think", b">", b"a")
    assert text.forced() == b"\n</think>"
    plain = Text("tags are spelt", is_open=False, budget=1).say(b"<", b"a", b"a", b"a")
    assert len(plain.allowed()) == plain.size


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_grammar_holds_for_the_answer_alone(vocabulary):
    text = Text(vocabulary, DIGIT).say(b"x", b"7")
    assert END not in text.allowed()
    for piece in [b"</think>"] if b"</think>" in text.tokens else [b"</", b"think", b">"]:
        text.say(piece)
    digits = {text.tokens.index(b"%d" % digit) for digit in range(10)}
    feeds = {text.tokens.index(b"\n"), text.tokens.index(b"\n\n")}
    assert text.allowed() == digits | feeds
    text.say(b"\n\n")
    assert text.allowed() == digits
    text.say(b"7")
    assert text.constraint.is_finished


def test_a_token_that_ends_the_thoughts_cannot_begin_the_answer():
    text = Text("tags are spelt", DIGIT).say(b"</", b"think")
    assert text.tokens.index(b'>{"') not in text.allowed()
    assert text.tokens.index(b">") in text.allowed()


def test_an_answer_may_begin_without_thoughts():
    text = Text("tags are tokens", DIGIT, is_open=False)
    assert text.tokens.index(b"<think>") in text.allowed()
    assert text.tokens.index(b"a") not in text.allowed()
    assert text.say(b"7").constraint.is_finished
    thinks = Text("tags are tokens", DIGIT, is_open=False, budget=1).say(b"<think>", b"a")
    assert thinks.forced() == b"\n</think>"
    assert thinks.say(b"7").constraint.is_finished


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("grammar", [None, DIGIT])
@pytest.mark.parametrize("is_open", [True, False])
def test_drafts_are_masked_as_if_they_were_accepted(vocabulary, grammar, is_open):
    random_state = random.Random(7)
    for budget, trial in itertools.product([None, 0, 2, 5], range(6)):
        text = Text(vocabulary, grammar, is_open, budget)
        alone = text.constraint.fork()
        drafts: list[int] = []
        rows: list[set[int]] = []
        for _ in range(8):
            rows.append(text.allowed())
            likely = {text.tokens.index(each) for each in (b"</think>", b"<think>", b"7") if each in text.tokens}
            allowed = sorted(rows[-1] - {END})
            if not allowed or text.constraint.is_finished:
                break
            token = random_state.choice(
                sorted(likely & set(allowed)) if trial % 2 and likely & set(allowed) else allowed
            )
            text.constraint.accept(token)
            drafts.append(token)
        text.constraint = alone
        assert alone.check(drafts) == len(drafts)
        assert text.rows(drafts)[: len(rows)] == rows
        assert text.allowed() == rows[0]  # nothing has moved
        for at, row in enumerate(rows):
            if missing := set(range(text.size)) - row:
                assert alone.check([*drafts[:at], min(missing)]) == at


def compiled(tokens: list[bytes], vocab_size: int, budget: int | None) -> Constraint | PeltonError:
    grammars = Grammars(vocab_size)
    grammars.learn(Vocabulary(tokens, control_ids=[], end_ids=[0]))
    grammars.compile("r", None, Thinking(open="<think>", close="</think>", is_open=True, budget=budget))
    while not grammars.is_ready:
        time.sleep(0.001)
    ((_, made),) = grammars.take()
    grammars.close()
    return made


def test_logits_of_no_token_are_thoughts_like_any():
    made = compiled([b"<end>", *VOCABULARIES["tags are tokens"]], 300, budget=9)
    assert not isinstance(made, PeltonError)
    made.accept(299)
    assert made.check([299, 298]) == 2


@pytest.mark.parametrize("missing", [b"\n", b"/"])
def test_a_vocabulary_that_cannot_spell_the_end_has_no_budget(missing):
    tokens = [b"<end>", *(each for each in VOCABULARIES["tags are spelt"][:256] if each != missing)]
    refused = compiled(tokens, len(tokens), budget=9)
    assert isinstance(refused, PeltonError)
    assert refused.param == "reasoning_budget"
    assert not isinstance(compiled(tokens, len(tokens), budget=None), PeltonError)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_closing_tag_is_forced_and_then_what_the_answer_forces(vocabulary):
    grammar = Grammar(kind="regex", text="yes[0-9]", param="response_format")
    text = Text(vocabulary, grammar, budget=2)
    assert list(text.constraint.forced()) == []
    text.say(b"a", b"b")
    spelt = b""
    while (forced := list(text.constraint.forced())) and b"</think>" not in spelt:
        assert {forced[0]} == text.allowed()
        text.constraint.accept(forced[0])
        spelt += text.tokens[forced[0]]
    assert spelt == b"\n</think>"
    assert text.constraint.begun() == b""
    text.say(b"y")
    assert text.constraint.begun() == b"es"
    assert [text.tokens[token] for token in text.constraint.forced()] == [b"e", b"s"]
