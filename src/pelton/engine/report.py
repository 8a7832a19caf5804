"""What an engine says of itself: what is loaded, what it has done and what it holds."""

from __future__ import annotations

from pelton.engine.constraints import Grammars
from pelton.engine.pins import Pins
from pelton.engine.protocol import Counters, EngineInfo
from pelton.engine.runner import Runner
from pelton.engine.scheduler import Scheduler


def info_of(runner: Runner, kv_tokens: int) -> EngineInfo:
    """What is loaded, with KV memory for so many tokens."""
    draft = runner.draft
    plans = [runner.plan, *(() if draft is None else (draft.plan,))]
    return EngineInfo(
        vocab_size=runner.vocab_size,
        context=runner.context,
        width=runner.width,
        files=runner.files,
        fingerprint=runner.fingerprint,
        max_sequences=runner.max_sequences,
        kv_tokens=kv_tokens,
        draft_context=0 if draft is None else draft.context,
        weight_bytes=sum(plan.weights for plan in plans),
        kv_bytes=sum(plan.kv for plan in plans),
        arena_bytes=sum(plan.arena for plan in plans),
    )


class Report:
    """What one engine did. `counted`: of that, what is counted where it happens."""

    def __init__(self, scheduler: Scheduler, grammars: Grammars, pins: Pins) -> None:
        self._scheduler = scheduler
        self._in_flight = scheduler.in_flight
        self._grammars = grammars
        self._pins = pins
        self.counted = Counters(kv_blocks_total=sum(pool.num_usable for pool in scheduler.memory.pools))

    @property
    def counters(self) -> Counters:
        """What was done so far, and what is held now."""
        counters = self.counted
        counters.num_running = len(self._in_flight.running)
        counters.num_waiting = self._in_flight.num_waiting + self._grammars.num_compiling
        draft_model, tier = self._in_flight.draft_model, self._in_flight.fetching.tier
        if tier is not None:
            counters.disk_bytes_read, counters.disk_bytes_written = tier.num_read, tier.num_written
        counters.preempted = self._scheduler.admission.num_preempted
        counters.swapped = self._scheduler.admission.num_swapped
        counters.drafted = self._scheduler.drafts.num_drafted
        counters.accepted = self._scheduler.drafts.num_accepted
        if draft_model is not None:
            counters.drafted_by_model = draft_model.num_drafted
            counters.accepted_by_model = draft_model.num_accepted
        counters.kv_blocks_used = sum(pool.num_used for pool in self._in_flight.memory.pools)
        counters.pins = self._pins.infos
        return counters
