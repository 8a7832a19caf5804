"""What was drawn -> what requests get: tokens, ends and the events that tell of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pelton.backends.base import BAD_LOGITS, Sampled
from pelton.engine.batch import Row
from pelton.engine.beam import Candidate, events_of, follow
from pelton.engine.forks import Forks
from pelton.engine.in_flight import InFlight
from pelton.engine.outcome import draw_error, error_event, likeliest, prompt_event, token_event
from pelton.engine.pins import Pins
from pelton.engine.protocol import Counters, StepEvent
from pelton.engine.sequence import Sequence, SequenceGroup
from pelton.errors import PeltonError
from pelton.ops.data import F32
from pelton.request import Accepted, Done, Embedding, ErrorEvent, Finish, FinishReason, TokenEvent, Usage


class Answers:
    """The requests in flight, `groups` by their ids, and what is still to be told of them. `clock` gives seconds.
    `on_end` is told the id of each that has ended."""

    def __init__(
        self,
        in_flight: InFlight,
        forks: Forks,
        pins: Pins,
        counters: Counters,
        clock: Callable[[], float],
        on_end: Callable[[str], None],
    ) -> None:
        self.groups: dict[str, SequenceGroup] = {}
        self.events: list[StepEvent] = []
        self._in_flight = in_flight
        self._forks = forks
        self._pins = pins
        self._counters = counters
        self._clock = clock
        self._on_end = on_end
        self._ready: list[SequenceGroup] = []
        """Beam searches that can go on."""
        self._begun: set[SequenceGroup] = set()
        """Those whose first token was drawn in this step."""

    def take_events(self) -> list[StepEvent]:
        """What has not been told yet."""
        events, self.events = self.events, []
        return events

    def stamp(self, now: float) -> None:
        """Keep when a step ended, with those whose first token was drawn in it."""
        for group in self._begun:
            group.drawn_at = now
        self._begun.clear()

    def accept(self, group: SequenceGroup) -> None:
        """Tell a client, once, that its request is taken."""
        if not group.is_accepted:
            group.is_accepted = True
            self.events.append(Accepted(group.request.id, group.warnings))

    def refuse(self, request_id: str, error: PeltonError) -> None:
        """Tell a client that its request is not taken."""
        self.events.append(error_event(request_id, error))

    def abort(self, group: SequenceGroup, choice: int | None) -> None:
        """End a request, or one of its choices, for which nobody waits any more."""
        self.accept(group)  # also where its grammar is not ready: what ends has been accepted
        if group.beams is not None:
            self._counters.aborted += group.request.sampling.n
            self._end_beams(group, [Finish(group.request.id, i, "abort") for i in range(group.request.sampling.n)])
            return
        for sequence in group.sequences:
            if sequence.state != "finished" and choice in (None, sequence.choice):
                self._counters.aborted += 1
                self.finish(sequence, "abort")

    def add(self, rows: list[Row], sampled: Sampled, accepted: Mapping[Sequence, int]) -> None:
        """Give each row of a step what was drawn in it. `accepted`: of each sequence that had a draft, how many tokens
        of that it keeps."""
        ids, errors = sampled.ids.tolist(), sampled.errors.tolist()
        mus = sampled.mu.tolist()
        for row, ((sequence, offset, target), token) in enumerate(zip(rows, ids, strict=True)):
            group = sequence.group
            kept = accepted.get(sequence, 0)
            if offset > kept or sequence.state == "finished":  # another choice of its request could not draw
                continue
            if target < 0 and sequence.num_prompt == sequence.max_length:  # it is not to draw at all
                self._end_prompt(sequence)
                continue
            if errors[row]:
                self.fail(group, draw_error(errors[row]))
                continue
            if target >= 0:
                group.num_scored += 1
                self.events.append(prompt_event(sequence, target, sampled, row))
            elif group.beams is not None:
                self._offer(sequence, sampled, row)
            else:
                self._take(sequence, token, sampled, row, mus[row] if offset == kept else None)
        self._advance_beams()

    def _take(self, sequence: Sequence, token: int, sampled: Sampled, row: int, mu: float | None) -> None:
        """A token was drawn. `mu`: mirostat's bound after it; None where the token is an accepted one of the draft,
        which the sequence has already."""
        group, constraint = sequence.group, sequence.constraint
        if group.drawn_at is None:
            self._begun.add(group)
        if constraint is not None:
            constraint.accept(token)
            if (error := constraint.error) is not None:
                self.fail(group, error)
                return
        if token in group.end_ids:
            group.num_ends += 1
            logprob = None if group.num_logprobs is None else float(sampled.logprobs[row])
            self.finish(sequence, "stop", token, logprob)
            return
        if mu is not None:
            sequence.tokens.append(token)
            sequence.mu = mu
        self.events.append(token_event(sequence, token, sampled, row))
        if constraint is not None and constraint.is_finished:
            self.finish(sequence, "stop")
        elif mu is not None and len(sequence.tokens) == sequence.max_length:
            self.finish(sequence, "length")

    def embed(self, rows: list[tuple[Sequence, int]], states: F32) -> None:
        """Give texts their next hidden states [P, D]: so many to each, in that order."""
        end = 0
        for sequence, count in rows:
            group, start, end = sequence.group, end, end + count
            assert group.pool is not None
            group.pool.add(states[start:end])
            if not group.pool.is_complete:
                continue
            if (vector := group.pool.vector) is None:
                self.fail(group, draw_error(BAD_LOGITS))
                continue
            self.events.append(Embedding(group.request.id, vector.astype("<f4").tobytes()))
            self.finish(sequence, "stop")

    def _end_prompt(self, sequence: Sequence) -> None:
        """All that was asked for is a prompt, which is in memory now."""
        if sequence.group.request.pin_ttl:
            try:
                self._pins.add(sequence, self._clock())
            except PeltonError as error:  # others have been pinned meanwhile
                self.fail(sequence.group, error)
                return
        self.finish(sequence, "length")

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_id: int | None = None, logprob: float | None = None
    ) -> None:
        """End a choice, and its request with the last one."""
        group = sequence.group
        self._in_flight.finish(sequence)
        self.events.append(Finish(group.request.id, sequence.choice, reason, stop_id, logprob))
        if group.is_finished:
            self._end_well(group, group.num_completion)

    def _end_well(self, group: SequenceGroup, num_completion: int) -> None:
        usage = Usage(
            prompt_tokens=len(group.request.prompt_ids),
            completion_tokens=num_completion,
            cached_tokens=group.num_cached or 0,
        )
        self._counters.prompt_tokens += usage.prompt_tokens
        self._counters.cached_tokens += usage.cached_tokens
        self._counters.completion_tokens += usage.completion_tokens
        queued = prefill = 0.0
        if group.has_started:
            queued = group.started_at - group.arrived_at
            prefill = (self._clock() if group.drawn_at is None else group.drawn_at) - group.started_at
        self._end(group, Done(group.request.id, usage, queued, prefill))

    def _offer(self, sequence: Sequence, sampled: Sampled, row: int) -> None:
        """A slot of a beam search has its candidates; where all have, the search goes on after the step."""
        group, beams = sequence.group, sequence.group.beams
        assert beams is not None
        if group.drawn_at is None:
            self._begun.add(group)
        top = likeliest(sampled, row, max(beams.num_candidates, group.request.sampling.logprobs or 0))
        beams.offer(sequence.choice, [Candidate(each.id, each.logprob) for each in top], top)
        if beams.is_ready:
            self._ready.append(group)

    def _advance_beams(self) -> None:
        ready, self._ready = self._ready, []
        for group in ready:
            is_open = self.groups.get(group.request.id) is group
            if group.beams is None or not is_open or not group.beams.is_ready:  # it has ended, or gone on already
                continue
            follow(group.beams.advance(), group.sequences, self._forks)
            if group.beams.is_done:
                self._end_beams(group, events_of(group.beams, group.request))

    def _end_beams(self, group: SequenceGroup, events: list[TokenEvent | Finish]) -> None:
        for sequence in group.sequences:
            self._in_flight.finish(sequence)
        self.events += events
        self._end_well(group, sum(isinstance(e, TokenEvent) or e.stop_id is not None for e in events))

    def fail(self, group: SequenceGroup, error: PeltonError) -> None:
        """End a request that an error ends."""
        for sequence in group.sequences:
            if sequence.state != "finished":
                self._in_flight.finish(sequence)
        self._counters.completion_tokens += group.num_completion
        self._end(group, error_event(group.request.id, error))

    def _end(self, group: SequenceGroup, event: Done | ErrorEvent) -> None:
        del self.groups[group.request.id]
        self._on_end(group.request.id)
        self.events.append(event)
