"""Logits processors: found by entry point, exact in all company, and harmful to nobody but who asks for them."""

from __future__ import annotations

import threading
import time
from importlib.metadata import EntryPoint
from itertools import pairwise

import numpy as np
import pytest

from pelton.engine import processors
from pelton.request import Done, ErrorEvent, ProcessorCall
from tests.unit.toy_executor import VOCAB, make_engine, prompt, request, run


class OnlyMultiples:
    """Bans all but multiples of `of`; of the last output token, too, where `no_repeat` is given."""

    num_calls = 0
    held = threading.Event()

    def __init__(self, vocab_size: int) -> None:
        assert vocab_size == VOCAB

    def check(self, args):
        if args.get("of", 2) < 1:
            raise ValueError("of must be at least 1")

    def apply(self, logits, rows):
        OnlyMultiples.num_calls += 1
        assert logits.shape == (len(rows), VOCAB)
        for row, values in zip(rows, logits, strict=True):
            if row.args.get("break") == len(row.output_ids):
                raise RuntimeError("as told")
            if row.args.get("hang") == len(row.output_ids):
                OnlyMultiples.held.wait()
            if row.args.get("spoil") == len(row.output_ids):
                values[:] = np.nan
            values[np.arange(VOCAB) % row.args.get("of", 2) > 0] = -np.inf
            if row.args.get("no_repeat") and len(row.output_ids):
                values[row.output_ids[-1]] = -np.inf
            assert row.prompt_ids.tolist()[: row.args.get("known", 0)] == prompt(row.args.get("known", 0))


def broken(vocab_size: int):
    raise OSError("no such library")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    found = [
        EntryPoint("multiples", f"{__name__}:OnlyMultiples", processors.GROUP),
        EntryPoint("broken", f"{__name__}:broken", processors.GROUP),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found if group == processors.GROUP else [])


def asked(id, *calls, length=20, **params):
    return request(id, prompt(length), logits_processors=calls, max_tokens=20, **params)


MIX = [
    asked("even", "multiples"),
    asked("thirds", ProcessorCall(name="multiples", args={"of": 3, "no_repeat": True, "known": 20})),
    asked("both", "multiples", ProcessorCall(name="multiples", args={"of": 3}), n=2, temperature=1.0),
    request("plain", prompt(30)),
]


def alone(one):
    engine, _ = make_engine(prefix_cache=False)
    return run(engine, [one])


@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 7}, {"num_blocks": 7}])
def test_processors_are_exact_in_all_company(settings):
    engine, _ = make_engine(**settings)
    transcript = run(engine, MIX)
    for one in MIX:
        assert transcript.answers(one.id) == alone(one).answers(one.id)
    assert all(token % 2 == 0 for token in transcript.tokens("even"))
    thirds = transcript.tokens("thirds")
    assert all(token % 3 == 0 for token in thirds)
    assert all(a != b for a, b in pairwise(thirds))
    assert all(token % 6 == 0 for choice in range(2) for token in transcript.tokens("both", choice))


def test_one_call_serves_all_rows_of_a_step():
    engine, _ = make_engine()
    OnlyMultiples.num_calls = 0
    run(engine, [asked(str(i), "multiples") for i in range(4)])
    assert OnlyMultiples.num_calls <= 21


@pytest.mark.parametrize("fault", ["break", "spoil"])
def test_an_error_ends_its_own_request_alone(fault):
    engine, _ = make_engine()
    wrong = asked("wrong", ProcessorCall(name="multiples", args={fault: 5}), n=2, temperature=1.0)
    transcript = run(engine, [*MIX, wrong])
    event = transcript.last("wrong")
    assert isinstance(event, ErrorEvent)
    assert event.kind == "InternalError"
    assert "multiples" in event.message
    assert len(transcript.tokens("wrong")) == 5
    for one in MIX:
        assert isinstance(transcript.last(one.id), Done)
        assert transcript.answers(one.id) == alone(one).answers(one.id)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        ("unknown", "InvalidRequest", "no logits processor 'unknown'; installed: broken, multiples"),
        (ProcessorCall(name="multiples", args={"of": 0}), "InvalidRequest", "multiples': of must be at least 1"),
        (ProcessorCall(name="multiples", args={"of": "2"}), "InternalError", "'multiples' cannot check its arguments"),
        ("broken", "InternalError", "'broken' cannot be loaded: no such library"),
    ],
)
def test_what_cannot_be_processed_is_refused_at_once(call, kind, words):
    engine, _ = make_engine()
    (event,) = run(engine, [asked("a", call)]).events["a"]
    assert isinstance(event, ErrorEvent)
    assert event.kind == kind
    assert words in event.message


def test_one_that_does_not_return_ends_what_asked_for_it_and_is_refused_until_it_does():
    OnlyMultiples.held.clear()
    engine, _ = make_engine(processor_timeout=0.2)
    hung = asked("hung", ProcessorCall(name="multiples", args={"hang": 5}))
    began = time.monotonic()
    transcript = run(engine, [request("plain", prompt(30)), hung])
    assert 0.2 <= time.monotonic() - began < 5
    event = transcript.last("hung")
    assert isinstance(event, ErrorEvent)
    assert event.message == "logits processor 'multiples' failed: it took longer than 0.2 s (processor_timeout)"
    assert len(transcript.tokens("hung")) == 5
    assert transcript.answers("plain") == alone(request("plain", prompt(30))).answers("plain")
    event = run(engine, [asked("again", "multiples")]).last("again")
    assert isinstance(event, ErrorEvent)
    assert "'multiples'" in event.message
    assert "has not returned from an earlier call" in event.message
    OnlyMultiples.held.set()
    deadline = time.monotonic() + 5
    while isinstance((transcript := run(engine, [asked("later", "multiples")])).last("later"), ErrorEvent):
        assert time.monotonic() < deadline
    assert transcript.answers("later") == alone(asked("later", "multiples")).answers("later")
    engine.close()
