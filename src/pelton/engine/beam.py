"""Beam search: the likeliest continuations of a prompt, `width` of them kept at each length.

A hypothesis' score is the sum of its tokens' logprobs, the end token's included, divided by its number of tokens to
the power of the length penalty. Each live hypothesis has a slot: a sequence of the engine that holds its KV memory.
At each length the candidates of all slots are compared; the best ones that do not end become the next hypotheses, and
an end token among the first `width` candidates makes a finished one, of which the best `width` are kept.

Source: the beam search of Hugging Face Transformers, whose `length_penalty` and `early_stopping` mean the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pelton.request import EngineRequest, Finish, FinishReason, Logprob, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from pelton.engine.forks import Forks
    from pelton.engine.sequence import Sequence


class Candidate(NamedTuple):
    """A token that may follow a slot's hypothesis."""

    token: int
    logprob: float


class Trail(NamedTuple):
    """A hypothesis' last token, and what led to it."""

    before: Trail | None
    token: int
    logprob: float
    top: tuple[Logprob, ...]


class Finished(NamedTuple):
    """A hypothesis that has ended, by `stop_id` or (None) at its greatest length."""

    score: float
    trail: Trail | None
    stop_id: int | None
    stop_logprob: float | None


class Next(NamedTuple):
    """Slot `slot` goes on from the hypothesis of slot `parent` with a token."""

    slot: int
    parent: int
    token: int


@dataclass
class _Slot:
    total: float = 0.0
    trail: Trail | None = None
    is_live: bool = False
    candidates: list[Candidate] | None = None
    top: tuple[Logprob, ...] = ()


class Beams:
    """The search of one request. Slots are offered candidates in any order; `advance` goes one token on."""

    def __init__(self, sampling: SamplingParams, end_ids: frozenset[int]) -> None:
        self.width = sampling.beam_width or sampling.n
        self.num_candidates = self.width + len(end_ids)
        """Likeliest tokens that are needed of each slot: enough that do not end, whatever does."""
        self.finished: list[Finished] = []
        """The best first."""
        self.is_done = False
        self._sampling = sampling
        self._end_ids = end_ids
        self._length = 0
        self._slots = [_Slot() for _ in range(self.width)]
        self._slots[0].is_live = True  # all begin as the prompt: the others would only repeat the first

    def offer(self, slot: int, candidates: list[Candidate], top: tuple[Logprob, ...] = ()) -> None:
        """The likeliest next tokens of a slot, the best first. `top`: what is reported beside the one that is taken."""
        self._slots[slot].candidates = candidates
        self._slots[slot].top = top

    def has_offer(self, slot: int) -> bool:
        """Does a slot need no more of the model before the search goes on?"""
        return not self._slots[slot].is_live or self._slots[slot].candidates is not None

    @property
    def is_ready(self) -> bool:
        """Can it go on?"""
        return not self.is_done and all(map(self.has_offer, range(self.width)))

    def advance(self) -> list[Next]:
        """Go one token on: what each live slot becomes. A slot that is not told of holds nothing any more. A parent
        keeps one of its own continuations."""
        self._length += 1
        chosen = self._choose()
        if self._length == self._sampling.max_tokens:
            for total, slot, candidate in chosen:
                self._finish(total, self._extend(slot, candidate), None, None)
            chosen = []
        self.is_done = not chosen or self._is_decided(chosen[0][0])
        return [] if self.is_done else self._assign(chosen)

    def _choose(self) -> list[tuple[float, int, Candidate]]:
        """The next hypotheses: (sum of logprobs, slot, candidate), the best first. Those that end are put aside."""
        offers = [
            (slot.total + candidate.logprob, index, candidate)
            for index, slot in enumerate(self._slots)
            if slot.is_live
            for candidate in slot.candidates or ()
        ]
        offers.sort(key=lambda offer: (-offer[0], offer[1], offer[2].token))
        chosen: list[tuple[float, int, Candidate]] = []
        rank = 0
        for total, index, candidate in offers:
            if candidate.token not in self._end_ids:
                chosen.append((total, index, candidate))
            elif self._length <= self._sampling.min_tokens:
                continue
            elif rank < self.width:
                self._finish(total, self._slots[index].trail, candidate.token, candidate.logprob)
            rank += 1
            if len(chosen) == self.width:
                break
        return chosen

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self._sampling.length_penalty)

    def _finish(self, total: float, trail: Trail | None, stop_id: int | None, logprob: float | None) -> None:
        self.finished.append(Finished(self._score(total, self._length), trail, stop_id, logprob))
        self.finished.sort(key=lambda each: -each.score)
        del self.finished[self.width :]

    def _is_decided(self, best: float) -> bool:
        """Can nothing that is still to come be better than what has ended? `best`: the greatest sum of a live one."""
        if len(self.finished) < self.width:
            return False
        if self._sampling.early_stopping is True:
            return True
        length = self._length
        if self._sampling.early_stopping == "never" and self._sampling.length_penalty > 0:
            length = self._sampling.max_tokens or length
        return self.finished[-1].score >= self._score(best, length)

    def _extend(self, slot: int, candidate: Candidate) -> Trail:
        return Trail(self._slots[slot].trail, candidate.token, candidate.logprob, self._slots[slot].top)

    def _assign(self, chosen: list[tuple[float, int, Candidate]]) -> list[Next]:
        parents = {index for _, index, _ in chosen}
        free = [slot for slot in range(self.width) if slot not in parents]
        slots = [_Slot() for _ in range(self.width)]
        following = []
        for total, parent, candidate in chosen:
            slot = parent if parent in parents else free.pop(0)
            parents.discard(parent)
            slots[slot] = _Slot(total, self._extend(parent, candidate), is_live=True)
            following.append(Next(slot, parent, candidate.token))
        self._slots = slots
        return following


def tokens_of(trail: Trail | None) -> list[Trail]:
    """A hypothesis' tokens, the first first."""
    tokens = []
    while trail is not None:
        tokens.append(trail)
        trail = trail.before
    return tokens[::-1]


def follow(following: list[Next], sequences: list[Sequence], forks: Forks) -> None:
    """Make the sequences of the slots what the slots have become."""
    for slot, parent, _ in following:
        if slot != parent:
            forks.refork(sequences[parent], sequences[slot])
    for slot in set(range(len(sequences))) - {each.slot for each in following}:
        forks.park(sequences[slot])
    for slot, _, token in following:
        sequences[slot].tokens.append(token)
        forks.unpark(sequences[slot])


def events_of(beams: Beams, request: EngineRequest) -> list[TokenEvent | Finish]:
    """What the client is told of the best hypotheses."""
    wanted = request.sampling.logprobs
    events: list[TokenEvent | Finish] = []
    for choice, (_, trail, stop_id, logprob) in enumerate(beams.finished[: request.sampling.n]):
        for each in tokens_of(trail):
            told = () if wanted is None else (each.logprob, each.top[:wanted])
            events.append(TokenEvent(request.id, choice, each.token, *told))
        reason: FinishReason = "length" if stop_id is None else "stop"
        events.append(Finish(request.id, choice, reason, stop_id, None if wanted is None else logprob))
    return events
