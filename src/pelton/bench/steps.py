"""Whole steps of a model, taken apart: which share each op has, and how near it is to the machine's limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pelton.backends.base import OpTime, StepProfile
from pelton.bench.limits import Limits, Times
from pelton.bench.result import Result, judge
from pelton.config import EngineConfig
from pelton.engine.engine import Engine, load
from pelton.engine.protocol import Start, Unfold
from pelton.errors import InternalError
from pelton.request import EngineRequest, ErrorEvent, SamplingParams

FIRST_ID = 1000


@dataclass(frozen=True)
class Steps:
    """What to measure: a prompt alone, then decoding with each number of streams."""

    prompt: int = 512
    streams: Sequence[int] = (1, 32)
    tokens: int = 32


def measure_steps(
    steps: Steps, path: Path, isa: str, num_threads: int, limits: Limits
) -> Iterator[tuple[str, StepProfile, list[Result]]]:
    """A name, the profile, and each of its ops judged, in the same order. Raises what loading the model raises."""
    for what, num_streams, prompt, tokens in (
        (f"prompt of {steps.prompt}", 1, steps.prompt, 1),
        *((f"{n} decoding", n, 16, steps.tokens) for n in steps.streams),
    ):
        config = EngineConfig(
            isa=isa,
            threads=num_threads,
            context=prompt + tokens,
            max_sequences=num_streams,
            prefix_cache=False,
            profile=True,
        )
        profiles = _run(load(Start(str(path), config)), num_streams, prompt, tokens)
        profile = next(each for each in profiles if (each.work == "prompt") == (tokens == 1))
        yield what, profile, [_judged(op, limits) for op in profile.ops]


def _run(engine: Engine, num_streams: int, prompt: int, tokens: int) -> list[StepProfile]:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, seed=0, ignore_eos=True)
    span = engine.info.vocab_size // 2
    for i in range(num_streams):
        ids = [(FIRST_ID + 7919 * i + 31 * j) % span for j in range(prompt)]
        engine.submit(EngineRequest(id=str(i), prompt_ids=ids, sampling=sampling))
    unfold = Unfold()
    while engine.has_work:
        for event in unfold(engine.step()):
            if isinstance(event, ErrorEvent):
                raise InternalError(event.message)
    profiles = engine.runner.profile()
    engine.runner.close()
    return profiles


def _judged(op: OpTime, limits: Limits) -> Result:
    peak = {"int8": limits.int8, "f32": limits.float32, "bf16": limits.bf16}.get(op.family)
    if op.name.startswith("attend"):
        peak = limits.float32
    mean = op.seconds / op.calls
    return judge(
        op.name.partition(" ")[0],
        op.name.partition(" ")[2],
        0,
        Times(mean, mean),
        num_bytes=round(op.num_bytes / op.calls),
        operations=round(op.operations / op.calls),
        limits=limits,
        peak=peak,
    )


def print_steps(what: str, profile: StepProfile, results: Sequence[Result], console: Console) -> None:
    """One line per op."""
    table = Table(title=f"{what}: {1e3 * profile.seconds / profile.num_steps:.2f} ms a step", title_justify="left")
    for name in ("op", "of", "calls", "ms a step", "GB/s", "GOP/s", "limit", "share of it", "share of the step"):
        table.add_column(name, justify="left" if name in {"op", "of", "limit"} else "right")
    for op, r in zip(profile.ops, results, strict=True):
        is_counted = op.num_bytes > 0
        table.add_row(
            r.op,
            r.subject,
            str(op.calls // profile.num_steps),
            f"{1e3 * op.seconds / profile.num_steps:.3f}",
            f"{r.bytes_per_second / 1e9:.1f}" if is_counted else "-",
            f"{r.operations_per_second / 1e9:.1f}" if is_counted else "-",
            r.limit if is_counted else "-",
            f"{100 * r.share:.0f} %" if is_counted else "-",
            f"{100 * op.seconds / profile.seconds:.1f} %",
        )
    console.print(table)
