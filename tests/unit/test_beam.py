"""Beam search against a plain one over lists, against all continuations there are, and through the engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import pytest

from pelton.engine.beam import Beams, Candidate, Finished, tokens_of
from pelton.request import EngineRequest, ErrorEvent, Finish, SamplingParams, TokenEvent
from tests.unit.toy_executor import Transcript, digest, make_engine, prompt, ranking, request, run, view

END = 0


def logprobs(tokens: tuple[int, ...], vocab: int) -> list[float]:
    """A toy model: any distribution over a small vocabulary after any tokens."""
    weights = [1 + digest(tokens, id) % 97 for id in range(vocab)]
    return [math.log(weight / sum(weights)) for weight in weights]


def search(params: SamplingParams, vocab: int, start: tuple[int, ...] = ()) -> list[Finished]:
    """The search with sequences that are lists of tokens."""
    beams = Beams(params, frozenset([END]))
    slots = {0: start}
    while not beams.is_done:
        for slot, tokens in slots.items():
            ranked = sorted(enumerate(logprobs(tokens, vocab)), key=lambda each: (-each[1], each[0]))
            assert not beams.has_offer(slot)
            beams.offer(slot, [Candidate(*each) for each in ranked[: beams.num_candidates]])
        assert beams.is_ready
        following = beams.advance()
        parents = {each.parent for each in following}
        assert all(any(e.slot == e.parent == parent for e in following) for parent in parents)
        slots = {each.slot: (*slots[each.parent], each.token) for each in following}
    return beams.finished


def tokens(finished: Finished) -> tuple[int, ...]:
    return tuple(each.token for each in tokens_of(finished.trail))


def everything(params: SamplingParams, vocab: int) -> list[tuple[float, tuple[int, ...]]]:
    """All continuations with their scores, the best first."""
    found = []
    for length in range(params.max_tokens + 1):
        for said in itertools.product(range(1, vocab), repeat=length):
            total = sum(logprobs(said[:i], vocab)[token] for i, token in enumerate(said))
            if length == params.max_tokens:
                found.append((total / length**params.length_penalty, said))
            elif length >= params.min_tokens:
                total += logprobs(said, vocab)[END]
                found.append((total / (length + 1) ** params.length_penalty, said))
    return sorted(found, reverse=True)


def plain(params: SamplingParams, vocab: int) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search as one would write it down first."""
    live, done = [(0.0, ())], []
    for length in range(1, params.max_tokens + 1):
        offers = [
            (total + logprob, said, id) for total, said in live for id, logprob in enumerate(logprobs(said, vocab))
        ]
        if length <= params.min_tokens:
            offers = [offer for offer in offers if offer[2] != END]
        offers.sort(key=lambda offer: -offer[0])
        ended = [offer for offer in offers[: params.beam_width] if offer[2] == END]
        done += [(total / length**params.length_penalty, said) for total, said, _ in ended]
        live = [(total, (*said, id)) for total, said, id in offers if id != END][: params.beam_width]
        done = sorted(done, reverse=True)[: params.beam_width]
        if len(done) == params.beam_width and (
            params.early_stopping is True or done[-1][0] >= live[0][0] / length**params.length_penalty
        ):
            return done
    done += [(total / params.max_tokens**params.length_penalty, said) for total, said in live]
    return sorted(done, reverse=True)[: params.beam_width]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("min_tokens", [0, 2])
def test_wide_enough_it_finds_the_best_of_all(penalty, min_tokens):
    params = SamplingParams(
        beam_width=200, max_tokens=4, min_tokens=min_tokens, length_penalty=penalty, early_stopping="never"
    )
    best = everything(params, 4)
    found = search(params, 4)
    assert [tokens(each) for each in found[:5]] == [said for _, said in best[:5]]
    assert [each.score for each in found[:5]] == pytest.approx([score for score, _ in best[:5]])


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("penalty", [0.5, 1.0])
@pytest.mark.parametrize(("vocab", "min_tokens"), [(5, 0), (20, 3)])
def test_it_is_the_plain_search(width, early, penalty, vocab, min_tokens):
    params = SamplingParams(
        beam_width=width, max_tokens=9, min_tokens=min_tokens, length_penalty=penalty, early_stopping=early
    )
    found = search(params, vocab)
    expected = plain(params, vocab)
    assert [tokens(each) for each in found] == [said for _, said in expected]
    assert [each.score for each in found] == pytest.approx([score for score, _ in expected])
    assert all((each.stop_id == END) == (each.stop_logprob is not None) for each in found)


def through_the_engine(asked: EngineRequest, beside: Sequence[EngineRequest] = (), **settings: object) -> Transcript:
    engine, _ = make_engine(**settings)
    return run(engine, [asked, *beside])


ASKED = request(
    "a", prompt(45), n=2, use_beam_search=True, beam_width=4, max_tokens=40, logprobs=1, end_ids=(1, 2), min_tokens=3
)
OTHERS = [request(str(i), prompt(40, i), max_tokens=60) for i in range(3)]


def in_lists(asked: EngineRequest) -> list[Finished]:
    """The engine's toy model, searched with lists for sequences."""
    beams = Beams(asked.sampling, frozenset(asked.end_ids))
    slots = {0: asked.prompt_ids}
    while not beams.is_done:
        for slot, said in slots.items():
            beams.offer(slot, [Candidate(*each) for each in ranking((view(said),))[: beams.num_candidates]])
        slots = {each.slot: [*slots[each.parent], each.token] for each in beams.advance()}
    return beams.finished


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batch_tokens": 5, "max_sequences": 5},
        {"prefix_cache": False},
        {"num_blocks": 9},
        {"num_blocks": 9, "prefix_cache": False},
        {"num_blocks": 9, "prefix_cache": False, "swap": 10_000},
        {"max_sequences": 4},
    ],
    ids=str,
)
def test_through_the_engine_it_is_the_same_whatever_runs_beside(settings):
    expected = in_lists(ASKED)
    transcript = through_the_engine(ASKED, OTHERS, **settings)
    for choice in range(2):
        assert tuple(transcript.tokens("a", choice)) == tokens(expected[choice])
    told = [e for e in transcript.answers("a") if isinstance(e, TokenEvent)]
    assert all(e.logprob is not None and len(e.top) == 1 for e in told)
    finishes = [e for e in transcript.events["a"] if isinstance(e, Finish)]
    assert [e.stop_id for e in finishes] == [each.stop_id for each in expected[:2]]


def test_a_search_that_is_aborted_gives_everything_back():
    for steps in (0, 1, 3, 10):
        engine, _ = make_engine(num_blocks=20)
        transcript = Transcript()
        for one in (ASKED, *OTHERS):
            engine.submit(one)
        for _ in range(steps):
            transcript.add(engine.step())
        engine.abort("a")
        engine.check()
        run(engine, transcript=transcript)
        assert transcript.answers("a") == [Finish("a", i, "abort") for i in range(2)]


def test_a_width_that_cannot_be_is_refused():
    for width in (1, 9):
        asked = msgspec.structs.replace(ASKED, sampling=msgspec.structs.replace(ASKED.sampling, beam_width=width))
        event = through_the_engine(asked).last("a")
        assert isinstance(event, ErrorEvent)
        assert event.param == "beam_width"
