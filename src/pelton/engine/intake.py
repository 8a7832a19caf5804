"""Requests that come: what speaks against taking one, and those whose grammars are not ready."""

from __future__ import annotations

from pelton.engine.answers import Answers
from pelton.engine.border import check_request
from pelton.engine.constraints import Grammars
from pelton.engine.pins import Pins
from pelton.engine.processors import Processors
from pelton.engine.runner import Runner
from pelton.engine.scheduler import Scheduler
from pelton.engine.sequence import SequenceGroup
from pelton.errors import InvalidRequest, Overloaded, PeltonError
from pelton.request import EngineRequest


class Intake:
    """Of one engine. What it does not take it raises; what waits is its scheduler's, and told by its answers."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        answers: Answers,
        pins: Pins,
        grammars: Grammars,
        processors: Processors,
    ) -> None:
        self._runner = runner
        self._in_flight = scheduler.in_flight
        self._admission = scheduler.admission
        self._answers = answers
        self._pins = pins
        self._grammars = grammars
        self._processors = processors

    def check(self, request: EngineRequest) -> None:
        """Raise what speaks against taking a request now."""
        if request.id in self._answers.groups or request.id in self._pins:
            raise InvalidRequest(f"a request with id {request.id!r} is in flight", param="id")
        check_request(request, self._runner.vocab_size, self._runner.max_sequences, self._runner.context)
        self._processors.check(request.sampling.logits_processors)
        if request.pin_ttl:
            self._pins.check(request)
        if self._admission.is_full(len(request.prompt_ids), request.priority):
            count, num_tokens = self._in_flight.num_waiting, self._in_flight.num_waiting_tokens
            raise Overloaded(
                f"{count} requests with {num_tokens} prompt tokens are waiting; try again later",
                retry_after=self._admission.seconds_to_serve(),
            )
        if request.is_constrained:
            self._grammars.check_room(request.tenant)

    def admit(self, group: SequenceGroup) -> None:
        """Have a request wait for its turn."""
        self._in_flight.add(next(sequence for sequence in group.sequences if sequence.state == "waiting"))
        self._answers.accept(group)

    def take_compiled(self) -> None:
        """Let requests go on whose grammars are ready."""
        for request_id, compiled in self._grammars.take():
            group = self._answers.groups[request_id]
            if isinstance(compiled, PeltonError):
                self._answers.fail(group, compiled)
                continue
            group.warnings = compiled.warnings
            for sequence in group.sequences:
                sequence.constraint = compiled.fork()
                if sequence.state == "compiling":
                    sequence.state = "waiting"
            self.admit(group)
