"""`pelton bench kernels`: each op beside the machine's limits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from pelton import config

if TYPE_CHECKING:
    from pelton.bench.kernels import Options
    from pelton.bench.limits import Limits


def kernels(
    isa: str | None,
    threads: int | None,
    ops: tuple[str, ...],
    types: tuple[str, ...],
    rows: tuple[int, ...],
    seconds: float,
    kv_dtype: str | None,
    model: str | None,
) -> None:
    """Measure the ops that are named, or all, then the steps of a model, and print the tables."""
    from pelton.bench import kernels as bench
    from pelton.bench.attention import Attention
    from pelton.bench.linear import Products
    from pelton.bench.sampling import Sampling
    from pelton.engine.machine import num_cores
    from pelton.ops.data import kv_type_named

    isa = config.load(isa=isa).engine.isa
    linear, sampling = Products(num_rows=rows), Sampling()
    attention = Attention(kv_type=kv_type_named(config.load(kv_dtype=kv_dtype).engine.kv_dtype))
    if types:
        linear = replace(linear, types=bench.types_named(types, isa))
    if ops:
        linear = linear if "linear" in ops else replace(linear, types=())
        attention = attention if "attention" in ops else replace(attention, heads=())
        sampling = sampling if "sampling" in ops else replace(sampling, vocab_sizes=())
    has_threads = not ops or "threads" in ops
    options = bench.Options(isa, threads or num_cores(), linear, attention, sampling, has_threads, seconds=seconds)
    limits, results = bench.run(options)
    bench.print_table(options, limits, results, Console())
    if model is not None:
        _steps(model, options, limits)


def _steps(model: str, options: Options, limits: Limits) -> None:
    from pelton.bench.steps import Steps, measure_steps, print_steps
    from pelton.hub.pull import pull
    from pelton.progress.display import Display

    with Display() as display:
        path = pull(model, config.load().hub, display)
    console = Console()
    for what, profile, results in measure_steps(Steps(), path, options.isa, options.num_threads, limits):
        print_steps(f"{path.name}, {what}", profile, results, console)
