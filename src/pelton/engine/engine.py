"""The engine: requests in, events out, one step at a time. Read `Engine.step` first."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future

from pelton.backends.base import Pending
from pelton.config import EngineConfig
from pelton.engine import machine
from pelton.engine.answers import Answers
from pelton.engine.background import Background
from pelton.engine.batch import Batches, Row
from pelton.engine.budget import MemoryBudget
from pelton.engine.constraints import Grammars, Masks
from pelton.engine.deadlines import Deadlines
from pelton.engine.draft_model import DraftModel, open_draft_model
from pelton.engine.intake import Intake
from pelton.engine.kv_memory import KVMemory
from pelton.engine.pace import Pace, Shape
from pelton.engine.pins import Pins
from pelton.engine.plain import PlainRun, is_told_plainly
from pelton.engine.pooling import pooled
from pelton.engine.prepare import Prepared
from pelton.engine.processors import Processors
from pelton.engine.profile import table
from pelton.engine.protocol import (
    Counters,
    EngineInfo,
    Events,
    Identified,
    Start,
    StepEvent,
    Streams,
    Tokens,
    Vocabulary,
)
from pelton.engine.report import Report, info_of
from pelton.engine.runner import Runner
from pelton.engine.sampling import Sampling
from pelton.engine.scheduler import Scheduler
from pelton.engine.sequence import SequenceGroup
from pelton.engine.speculative import Speculation, count_accepted
from pelton.engine.tiers import DiskTier
from pelton.engine.work import Work
from pelton.errors import InternalError, PeltonError
from pelton.formats.bounded_folder import BoundedFolder
from pelton.formats.digest import of_model
from pelton.request import EngineRequest

log = logging.getLogger(__name__)

TELL = 1.0
"""Seconds for which counters that nobody waits for are not told again."""


def load(start: Start) -> Engine:
    """An engine with the model that is asked for. It may take all memory that is free."""
    prepared = Prepared(start)
    return load_prepared(prepared, prepared.plan(machine.free_memory()))


def load_prepared(prepared: Prepared, plan: MemoryBudget, progress: Callable[[float], None] | None = None) -> Engine:
    """The same in two steps. `progress` gets the share that is loaded."""
    start = prepared.start
    return Engine(prepared.load(plan, progress), start.config, prefixes=start.prefixes)


class Engine:
    """Runs the requests that are submitted to it. Every request ends in exactly one `Done` or `ErrorEvent`; the
    client ends the choices of one that failed."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
        *,
        prefixes: BoundedFolder | None = None,
    ) -> None:
        """`clock` gives seconds, for policy and timeouts. `prefixes`: where cached prefixes are kept."""
        self.runner = runner
        self._clock = clock
        self.pace = Pace(config.target_itl / 1000)
        self._draft_model: DraftModel | None = None
        self.memory = _memory_of(runner, config)
        self._tier = None if prefixes is None or not config.prefix_cache else self._new_tier(prefixes)
        self.scheduler = Scheduler(
            self.memory,
            self.pace,
            max_tokens=config.max_batch_tokens,
            max_sequences=runner.max_sequences,
            max_queue=config.max_queue,
            max_queue_tokens=config.max_queue_tokens,
            patience=config.patience,
            tier=self._tier,
            speculation=self._new_speculation(config) if config.speculation == "auto" else None,
        )
        self._in_flight = self.scheduler.in_flight
        self.on_news: Callable[[], None] = lambda: None
        """Called from another thread when there is something to do again."""
        self._batches = Batches(len(runner.windows), runner.advance)
        self._sampling = Sampling(runner.vocab_size)
        self._processors = Processors(runner.vocab_size, config.processor_timeout)
        self._grammars = Grammars(runner.vocab_size, self._tell)
        self._deadlines = Deadlines(config.queue_timeout, config.request_timeout)
        self._num_arrived = 0
        self._has_news = False
        self._due = -math.inf
        """When there is something to look at by time alone."""
        self._told = -math.inf
        """When the client was last told the counters."""
        self._last_end: float | None = None
        """When the last step ended, where the next one follows at once."""
        self._backgrounds: list[tuple[Runner, Background]] = []
        self._pins = Pins(self.memory, runner.context)
        self._report = Report(self.scheduler, self._grammars, self._pins)
        self._counted = self._report.counted
        self._answers = Answers(
            self._in_flight, self.scheduler.forks, self._pins, self._counted, clock, self._grammars.forget
        )
        self._intake = Intake(runner, self.scheduler, self._answers, self._pins, self._grammars, self._processors)
        self._open_tier()

    def _new_speculation(self, config: EngineConfig) -> Speculation:
        if self.runner.draft is None:
            return Speculation(self.pace)
        self._draft_model = open_draft_model(self.runner.draft, self.runner, self.pace, config, self._clock)
        return Speculation(self.pace, self._draft_model.policy)

    def _new_tier(self, folder: BoundedFolder) -> DiskTier:
        return DiskTier(
            folder,
            self.runner,
            self.memory.pools,
            self.memory.windows,
            self.runner.plan.bytes_per_block,
            is_busy=lambda: self._in_flight.has_work,
            tell=self._tell,
        )

    def _tell(self) -> None:
        """From another thread: something is ready."""
        self._has_news = True
        self.on_news()

    def _open_tier(self) -> None:
        digest, fingerprint = self.runner.digest, self.runner.fingerprint
        if self._tier is not None and digest is not None and fingerprint is not None:
            self._tier.open(digest, fingerprint)

    def step(self) -> list[StepEvent]:
        """One step of everything that runs. The events are also those of submissions and aborts since the last."""
        began = self._clock()
        if self._has_news or began >= self._due:
            self._take_news(began)
        self.scheduler.began = began
        work = self.scheduler.schedule()
        if work.plain is None:
            self._prepare(work)
        shape = work.shape
        if work.plain is None or not self._go_on(work, work.plain):
            self._compute(work)
        self._observe(shape, began, 0.0 if work.drafting is None else work.drafting.seconds)
        return self._answers.take_events()

    def _take_news(self, now: float) -> None:
        """What is due, and what has become ready beside the steps."""
        self._has_news = False
        for group, error in self._deadlines.expired(self._answers.groups, now):
            self._answers.fail(group, error)
        self._pins.expire(now)
        self._intake.take_compiled()
        self._in_flight.take_fetched()
        self._due = min(self._pins.next_end, self._deadlines.next)

    def _go_on(self, work: Work, plain: PlainRun) -> bool:
        """Make a steady step of which only tokens are told; False: it has to be computed as any other."""
        if not plain.can_go_on or not self._batches.can_keep(work):
            self.scheduler.steady.settle()
            work.plain = None
            return False
        drawn = self.runner.proceed(plain.ends)
        if drawn is not None:
            self.scheduler.steady.go_on(work, plain, drawn)
            self._answers.events.append(Tokens(drawn))
        else:  # an answer may end here
            self.scheduler.steady.settle()
            work.plain = None
            self.scheduler.commit(work, {})
            self._answers.add(plain.rows, plain.sampled, {})
        return True

    def _prepare(self, work: Work) -> None:
        """What comes before a step, its drafts among it."""
        self.runner.move(work.moves)
        self._in_flight.fetching.start()
        if self._draft_model is not None and work.drafting is not None:
            self._draft_model.run(work, work.drafting)

    def _compute(self, work: Work) -> None:
        if work.chunks:
            inputs, rows = self._batches.of(work)
            masks = self._grammars.start_masks(rows)
            pending = self.runner.submit(inputs)
            self._take(pending, rows, masks, work, inputs.num_pooled)
        self._due = -math.inf  # prefixes may have been pinned

    def _take(
        self, pending: Pending, rows: list[Row], masks: Future[Masks] | None, work: Work, num_pooled: int
    ) -> None:
        """What a step has computed: states that become vectors, and what is drawn."""
        if not num_pooled:
            self._draw(pending, rows, masks, work)
            return
        pooled_rows, states = pooled(work.chunks), pending.states()
        self._draw(pending, rows, masks, work)
        self._answers.embed(pooled_rows, states)

    def _draw(self, pending: Pending, rows: list[Row], masks: Future[Masks] | None, work: Work) -> None:
        if not rows:
            pending.wait()
            self.scheduler.commit(work, {})
            return
        job = self._processors.job(rows)
        sampled = pending.sample(self._sampling.arrays(rows, masks), None if job is None else job.processing)
        accepted = {} if work.is_steady else count_accepted(rows, sampled)
        self.scheduler.commit(work, accepted)
        for group, error in () if job is None else job.failed.items():
            self._answers.fail(group, error)
        self._answers.add(rows, sampled, accepted)
        is_free = masks is None and job is None and self._sampling.is_lasting
        if work.is_steady and is_free and all(map(is_told_plainly, rows)):
            work.plain = PlainRun(rows, sampled, self.memory.phases)
            self._answers.events.append(Streams(work.plain.streams))

    def _observe(self, shape: Shape, began: float, drafting: float) -> None:
        """Count a step, and tell the pace how long it took without the draft model's seconds, with what lay between it
        and the one before: a stream waits for both."""
        if not shape.num_tokens:
            self._last_end = None  # nothing ran: what comes next does not follow at once
            return
        ended = self._clock()
        self._answers.stamp(ended)
        seconds = ended - drafting - (began if self._last_end is None else self._last_end)
        self.pace.observe(shape, seconds)
        if self._draft_model is not None:
            self._draft_model.policy.stepped(shape, seconds)
        self._last_end = ended if self._in_flight.has_work else None
        self._counted.steps += 1

    @property
    def has_work(self) -> bool:
        """Would `step` do anything?"""
        return (
            self._in_flight.has_work
            or bool(self._answers.events)
            or self._grammars.is_ready
            or (self._tier is not None and self._tier.is_ready)
            or self.seconds_idle <= 0
        )

    @property
    def seconds_idle(self) -> float:
        """How long nothing will be due by time alone; infinite where nothing is to come."""
        return min(self._pins.next_end, self._deadlines.next) - self._clock()

    @property
    def info(self) -> EngineInfo:
        """What is loaded."""
        return info_of(self.runner, self.memory.capacity)

    @property
    def counters(self) -> Counters:
        """What was done so far, and what is held now."""
        return self._report.counters

    def submit(self, request: EngineRequest) -> None:
        """Take a request: its next events are `Accepted`, or one `ErrorEvent` that says why not."""
        try:
            self._intake.check(request)
        except PeltonError as error:
            self._answers.refuse(request.id, error)
            return
        self._num_arrived += 1
        self._counted.requests += 1
        group = self._answers.groups[request.id] = SequenceGroup(request, self._num_arrived)
        group.arrived_at = self._clock()
        self._deadlines.add(group, group.arrived_at)
        self._due = -math.inf
        if not request.is_constrained:
            self._intake.admit(group)
            return
        group.sequences[0].state = "compiling"
        self._grammars.compile(request.id, request.grammar, request.thinking, request.tenant)

    def learn(self, vocabulary: Vocabulary) -> None:
        """What grammars are made of; before the first request with one."""
        self._grammars.learn(vocabulary)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its choices, at once; its blocks are free for the next step."""
        group = self._answers.groups.get(request_id)
        if group is not None:
            self._answers.abort(group, choice)

    def unpin(self, request_id: str) -> None:
        """Pin the prompt of that request no longer."""
        self._pins.drop(request_id)

    def advance(self) -> list[StepEvent]:
        """`step`, but an exception in it ends the requests in flight and only them. Raises `InternalError` where
        there is no sound state to go on from."""
        try:
            return self.step()
        except Exception as error:
            return self._fail(error)

    def message(self, events: list[StepEvent]) -> Events:
        """What the client is told of a step: its events, and the counters, which are put off for a while where nothing
        has come of it but tokens."""
        now = self._last_end
        if now is not None and now < self._told + TELL and len(events) == 1 and isinstance(events[0], Tokens):
            return Events(events)
        self._told = -math.inf if now is None else now
        return Events(events, self.counters)

    def _fail(self, error: Exception) -> list[StepEvent]:
        log.error("a step failed", exc_info=error)
        self._last_end = None
        for group in list(self._answers.groups.values()):
            self._answers.fail(group, InternalError(f"the step of this request failed: {error}"))
        self._pins.clear()
        self.memory.clear_cache()  # blocks of the failed step may hold anything
        if self._draft_model is not None:
            self._draft_model.clear()
        self.check()
        return self._answers.take_events()

    def check(self) -> None:
        """Raise `InternalError` unless every block of KV memory is accounted for."""
        self._in_flight.check()

    def start_background(self, tell: Callable[[], None] = lambda: None) -> None:
        """Begin the work beside the steps. `tell` is called, from another thread, when there is something to do or
        `take_identified` has news."""
        self.on_news = tell
        after: Background | None = None
        for runner in filter(None, (self.runner, self.runner.draft)):
            after = runner.background(lambda: self.has_work, tell, after)
            self._backgrounds.append((runner, after))

    def take_identified(self) -> Identified | None:
        """The digests of a model's files, once: as soon as they have been taken."""
        for runner, background in self._backgrounds:
            if runner.digest is None and background.found is not None:
                runner.digest = of_model([file.sha256 for file in background.found])
                if runner is not self.runner:
                    return Identified(background.found, None)
                self._open_tier()
                return Identified(background.found, runner.fingerprint)
        return None

    def close(self) -> None:
        """Give all memory back, and say where the time went, where that was asked for."""
        self._grammars.close()
        self._processors.close()
        if self._tier is not None:
            self._tier.close()
        for _, background in self._backgrounds:
            background.close()
        sys.stderr.write("".join(map(table, self.runner.profile())))
        self.runner.close()


def _memory_of(runner: Runner, config: EngineConfig) -> KVMemory:
    return KVMemory(
        runner.windows,
        runner.num_blocks,
        max_chunk=config.max_batch_tokens,
        is_caching=config.prefix_cache,
        block_bytes=runner.plan.bytes_per_block,
        host_bytes=runner.plan.swap,
    )
