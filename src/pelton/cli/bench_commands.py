"""`pelton bench`: its commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pelton.cli.options import KV_TYPES


@click.group()
def bench() -> None:
    """Measure, beside the machine's limits."""


@bench.command("kernels")
@click.option("--isa", type=click.Choice(["generic", "avx2", "avx512", "amx"]), help="[default: the CPU's best]")
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads. [default: one per core]")
@click.option(
    "--op",
    "ops",
    multiple=True,
    type=click.Choice(["linear", "attention", "sampling", "threads"]),
    help="Repeatable. [default: all]",
)
@click.option(
    "--type", "types", multiple=True, help="Weight type of linear: Q4_K. Repeatable. [default: the usual ones]"
)
@click.option(
    "--rows",
    multiple=True,
    type=click.IntRange(1, 4096),
    default=(1, 4, 16, 64, 512),
    show_default=True,
    help="Activation rows of linear. Repeatable.",
)
@click.option("--seconds", type=click.FloatRange(0.001, 60), default=0.3, show_default=True, help="Per line.")
@click.option("--kv-dtype", type=click.Choice(KV_TYPES), help="KV cache of attention. [default: f16]")
@click.option("--model", help="Take this model's steps apart, too: each op's time and its share.")
def bench_kernels(**options: Any) -> None:
    """Measure each op beside what this machine's memory and arithmetic allow."""
    from pelton.cli import bench as command

    command.kernels(**options)


@bench.command("serve")
@click.option(
    "--url",
    multiple=True,
    default=("http://127.0.0.1:8000",),
    show_default=True,
    help="[NAME=]URL. Repeatable; the first is compared with each other.",
)
@click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True)
@click.option(
    "--concurrency",
    multiple=True,
    type=click.IntRange(1, 1000),
    help="Requests at once. Repeatable. [default: 1, 10, 50, 100]",
)
@click.option(
    "--rate",
    multiple=True,
    type=click.FloatRange(0, min_open=True),
    help="Requests per second, arriving by chance, in place of --concurrency. Repeatable.",
)
@click.option("--prompt", default="128", show_default=True, help="Tokens in: 128, or 32-512 for mixed lengths.")
@click.option("--output", default="128", show_default=True, help="Tokens out: 128, or 32-512 for mixed lengths.")
@click.option("--system", help="4x512: before each prompt one of 4 system prompts of 512 tokens, shared and not.")
@click.option("--requests", type=click.IntRange(1), default=16, show_default=True, help="Per load, at least.")
@click.option("--warm-up", type=click.IntRange(0), default=2, show_default=True, help="Requests before each load.")
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="Rounds; medians are shown.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of words, lengths and arrivals.")
@click.option("--slo", help="ttft=500,tpot=50,itl=100,e2e=9000: bounds in ms that a good request keeps.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600, show_default=True, help="Seconds.")
@click.option("--api-key", help="For servers that want one.")
@click.option("--weights", help="Bytes of the weights, or their file, where a server does not tell.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line per result in place of tables.")
@click.option("--json-file", type=click.Path(dir_okay=False, path_type=Path), help="Results and ratios.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="FILE.png (needs matplotlib).")
def bench_serve(concurrency: tuple[int, ...], rate: tuple[float, ...], **options: Any) -> None:
    """Put load on one or several OpenAI-compatible servers and compare them.

    docs/benchmarking.md says what each figure means.
    """
    from pelton.cli import load

    if concurrency and rate:
        raise click.UsageError("--concurrency waits for answers and --rate does not: give one of them")
    load.serve(load.Options(concurrency=concurrency or (1, 10, 50, 100), rate=rate, **options))


@bench.command("quality")
@click.argument("model")
@click.option(
    "--text",
    "text_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="UTF-8. [default: pydoc_data.topics of Python's standard library]",
)
@click.option("--context", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a window.")
@click.option("--tokens", "num_tokens", type=click.IntRange(2), default=4096, show_default=True, help="In all windows.")
@click.option(
    "--isa",
    "isas",
    multiple=True,
    type=click.Choice(["generic", "avx2", "avx512", "amx"]),
    help="Repeatable. [default: the best here of every kernel family]",
)
@click.option(
    "--kv-dtype",
    "kv_types",
    multiple=True,
    type=click.Choice(KV_TYPES),
    default=("f16", "f32"),
    show_default=True,
    help="Repeatable.",
)
@click.option(
    "--reference",
    "references",
    multiple=True,
    type=click.Choice(["float", "int8", "bf16", "bf16-unordered"]),
    help="Also compare the slow NumPy reference in a kernel family's numerics. Repeatable.",
)
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads. [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="One JSON line per result.")
def bench_quality(model: str, **options: Any) -> None:
    """Measure how near MODEL as it runs here is to the same model in float32: perplexity and KL divergence."""
    from pelton.cli import quality as command

    command.quality(model, **options)
