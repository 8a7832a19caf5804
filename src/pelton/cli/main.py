"""`pelton`: subcommands and their options. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import click

from pelton import __version__
from pelton.errors import PeltonError

KV_TYPES = ("f32", "bf16", "f16", "int8")
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class Group(click.Group):
    """Prints Pelton's own errors and the operating system's (a full disk, a forbidden folder) as one line, without a
    traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand."""
        _mend_streams()
        try:
            return super().invoke(ctx)
        except PeltonError as error:
            click.echo(f"pelton: {error.message}", err=True)
            ctx.exit(1)
        except OSError as error:
            if error.errno == errno.EPIPE:  # click knows: whoever read the output has gone
                raise
            click.echo(f"pelton: {error}", err=True)
            ctx.exit(1)


def _mend_streams() -> None:
    """A character that the terminal's encoding lacks is replaced, and a stream that the caller has closed is empty."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The settings of one model's engine; each also has a PELTON_ variable."""
    options = [
        click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads. [default: one per core]"),
        click.option(
            "--context", type=click.IntRange(1), help="Tokens a conversation may hold. [default: the model's]"
        ),
        click.option("--kv-dtype", type=click.Choice(KV_TYPES), help="Type of the KV cache. [default: f16]"),
        click.option(
            "--isa", type=click.Choice(["generic", "avx2", "avx512", "amx"]), help="[default: the CPU's best]"
        ),
        click.option(
            "--speculation",
            type=click.Choice(["auto", "off"]),
            help="Draft tokens from the text so far, where it pays; answers stay the same. [default: auto]",
        ),
        click.option(
            "--draft-model",
            metavar="MODEL",
            help="A smaller model with the same vocabulary that drafts tokens, too, where it pays.",
        ),
        click.option(
            "--packed-cache-size",
            type=click.FloatRange(0),
            help="GB of disk for what makes the next start fast; 0: none. [default: 20]",
        ),
        click.option(
            "--prefix-cache-dir",
            type=click.Path(file_okay=False),
            help="Where prompts' keys and values are kept for the next start. [default: beside the models]",
        ),
        click.option(
            "--prefix-cache-size",
            type=click.FloatRange(0),
            help="GB of disk for them; 0: none. [default: 4]",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group(cls=Group, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="pelton")
def main() -> None:
    """One engine for large language models, from a laptop to a cluster.

    A MODEL is a short name from the catalogue (smollm2), a repository on the Hugging Face Hub (owner/name:Q4_K_M), or
    the path of a .gguf file.
    """


@main.command()
@click.argument("model")
@click.argument("prompt", nargs=-1)
@click.option("--system", help="System message.")
@click.option("--max-tokens", type=click.IntRange(1), help="End the answer after this many tokens.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0: greedy. Without: the model's own, or 0.7.")
@click.option("--top-p", type=click.FloatRange(0, 1), help="Without: the model's own, or 0.95.")
@click.option("--seed", type=int, help="Makes the answer repeatable.")
@click.option("--verbose", is_flag=True, help="Show speed after each answer.")
@engine_options
def run(model: str, prompt: tuple[str, ...], **options: Any) -> None:
    """Answer PROMPT, or chat if there is none.

    A prompt may also come through a pipe: `pelton run smollm2 < question.txt`.
    """
    from pelton.cli import chat

    text = " ".join(prompt)
    if not text and not sys.stdin.isatty():
        text = sys.stdin.read().strip()
        if not text:
            raise click.UsageError("the prompt that came through the pipe is empty")
    chat.run(model, text or None, **options)


@main.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option("--any", "any_model", is_flag=True, help="Serve also what else is in the store.")
@click.option("--host", help="Address to listen on. [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="[default: 8000]")
@click.option(
    "--ollama",
    metavar="[HOST:PORT]",
    is_flag=False,
    flag_value="127.0.0.1:11434",
    help="Listen also where Ollama does: 127.0.0.1:11434, or --ollama=HOST:PORT.",
)
@click.option("--served-name", help="The name clients use. [default: MODEL]")
@click.option("--memory-budget", help="For all models together: 8GB. [default: what is free at the start]")
@click.option("--max-loaded-models", type=click.IntRange(0), help="At once. [default: what the memory holds]")
@click.option("--keep-alive", help="How long a model of the store stays unused: 30s, 1h, -1: for ever. [default: 5m]")
@click.option("--models-file", type=click.Path(dir_okay=False), help="TOML: more models, with settings of each.")
@click.option("--load-timeout", help="How long a request waits for its model to be loaded. [default: 10m]")
@click.option("--max-batch-tokens", type=click.IntRange(1), help="Tokens of one step. [default: 512]")
@click.option(
    "--target-itl",
    type=click.FloatRange(1),
    help="Milliseconds between tokens that a long prompt must not exceed. [default: 50, or two plain steps]",
)
@click.option("--max-sequences", type=click.IntRange(1), help="Sequences that run at once. [default: 64]")
@click.option("--max-queue", type=click.IntRange(0), help="Requests that may wait. [default: 256]")
@click.option("--max-queue-tokens", type=click.IntRange(1), help="Prompt tokens that may wait. [default: 1048576]")
@click.option(
    "--patience",
    type=click.IntRange(1),
    help="Tokens computed for more urgent requests before others have a turn. [default: 100000]",
)
@click.option("--queue-timeout", type=click.FloatRange(0), help="Seconds a request may wait. [default: any time]")
@click.option("--request-timeout", type=click.FloatRange(0), help="Seconds a request may take. [default: any time]")
@click.option("--tool-dialect", help="How the model writes tool calls. [default: auto, by its chat template]")
@click.option(
    "--pooling",
    type=click.Choice(["auto", "last", "mean", "cls"]),
    help="How texts become vectors, where the model's file does not say. [default: auto, last]",
)
@click.option("--drain-timeout", type=click.FloatRange(0), help="Seconds for answers to end at shutdown. [default: 30]")
@click.option("--api-key", help="A key that clients must have; better in PELTON_API_KEY, which `ps` does not show.")
@click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False), help="Such keys: KEY or NAME KEY a line.")
@click.option("--insecure", is_flag=True, default=None, help="Listen beyond this machine without any key.")
@click.option("--cors-origin", multiple=True, help="Origin of web pages that may use the server; *: all. Repeatable.")
@click.option("--allowed-host", multiple=True, help="A name of the server, for one without keys; *: any. Repeatable.")
@click.option("--ssl-certfile", type=click.Path(exists=True, dir_okay=False), help="Serve HTTPS with this certificate.")
@click.option(
    "--ssl-keyfile", type=click.Path(exists=True, dir_okay=False), help="[default: in the certificate's file]"
)
@click.option("--max-connections", type=click.IntRange(1), help="Open at once. [default: as there are files for]")
@click.option("--max-body", type=click.IntRange(1), help="Bytes of a request's body. [default: 32 MiB]")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="[default: text]")
@click.option("--log-prompts", is_flag=True, default=None, help="Log what requests ask.")
@click.option("--otel", is_flag=True, default=None, help="Send OpenTelemetry traces (needs pelton[otel]).")
@click.option("--strict-params", is_flag=True, default=None, help="Refuse parameters that would be ignored.")
@engine_options
def serve(models: tuple[str, ...], **options: Any) -> None:
    """Serve MODELs over HTTP, with OpenAI's API.

    Without a MODEL, whatever is in the store is served: loaded when it is first asked for, unloaded when it is not
    used for a while or when others need the memory.
    """
    from pelton.engine.child import Child

    # What the engine's process imports takes as long as what this one does: it is begun first.
    with closing(Child()) if models else nullcontext() as child:
        from pelton.cli import serve as command

        command.serve(models, child, **options)


@main.command()
@click.argument("model")
def pull(model: str) -> None:
    """Fetch MODEL into the local store."""
    from pelton.cli import models

    models.pull(model)


@main.command("list")
def list_models() -> None:
    """List the models in the local store."""
    from pelton.cli import models

    models.list_models()


@main.command()
@click.argument("model")
def show(model: str) -> None:
    """Show what MODEL is: architecture, sizes, types, template."""
    from pelton.cli import models

    models.show(model)


@main.command()
@click.argument("name")
@click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default="Modelfile",
    show_default=True,
    help="What describes it.",
)
def create(name: str, path: Path) -> None:
    """Make the model NAME of another one, as a Modelfile describes: docs/ollama.md."""
    from pelton.cli import create as command

    command.run(name, path)


@main.command()
@click.argument("model", nargs=-1, required=True)
def rm(model: tuple[str, ...]) -> None:
    """Remove MODEL from the local store."""
    from pelton.cli import models

    models.remove(model)


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where the server is that a command asks."""
    url = click.option("--url", help="Address of the server. [default: PELTON_URL, or this machine's port 8000]")
    return url(click.option("--api-key", help="[default: PELTON_API_KEY]")(command))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="As the server tells it.")
@server_options
def ps(**options: Any) -> None:
    """List the models that a running server has loaded."""
    from pelton.cli import remote

    remote.ps(**options)


@main.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@server_options
def stop(models: tuple[str, ...], **options: Any) -> None:
    """Let a running server unload MODEL; its requests in flight end first."""
    from pelton.cli import remote

    remote.stop(models, **options)


@main.command()
@click.argument("model")
@click.option("--memory-budget", help="Memory that it may take: 8GB. [default: what is free now]")
@click.option("--max-batch-tokens", type=click.IntRange(1), help="Tokens of one step. [default: 512]")
@click.option("--max-sequences", type=click.IntRange(1), help="Sequences that run at once. [default: 64]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@engine_options
def plan(model: str, **options: Any) -> None:
    """Show what memory MODEL takes and how many streams fit. Nothing is loaded."""
    from pelton.cli import plan as command

    command.plan(model, **options)


@main.group()
def keys() -> None:
    """Make, list and revoke the API keys of this machine's servers."""


@keys.command("create")
@click.option("--name", required=True, help="Whose it is.")
@click.option("--scopes", help="Of inference, models, metrics, admin; separated by commas. [default: inference]")
@click.option("--models", help="Names of the models that it may use, separated by commas. [default: all]")
@click.option("--rpm", type=click.IntRange(1), help="Requests per minute. [default: any number]")
@click.option("--tpm", type=click.IntRange(1), help="Tokens per minute, in and out. [default: any number]")
@click.option("--expires", help="30d, 12h, or a date as 2027-01-31 (UTC). [default: never]")
def keys_create(**options: Any) -> None:
    """Make a key and print it, this once."""
    from pelton.cli import keys as command

    command.create(**options)


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON line per key.")
def keys_list(as_json: bool) -> None:
    """List the keys."""
    from pelton.cli import keys as command

    command.list_keys(as_json)


@keys.command("revoke")
@click.argument("name")
def keys_revoke(name: str) -> None:
    """End the key of this NAME, or of this id, at once."""
    from pelton.cli import keys as command

    command.revoke(name)


@keys.command("usage")
@click.option("--name", help="One key's alone: its name or its id. [default: all]")
@click.option("--since", help="First day, as 2027-01-31 (UTC). [default: the first there is]")
@click.option("--json", "as_json", is_flag=True, help="One JSON line per day, key and model.")
def keys_usage(**options: Any) -> None:
    """Show what keys have used, by day and model."""
    from pelton.cli import keys as command

    command.usage(**options)


@main.group()
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
def bench_kernels(
    isa: str | None,
    threads: int | None,
    ops: tuple[str, ...],
    types: tuple[str, ...],
    rows: tuple[int, ...],
    seconds: float,
    kv_dtype: str | None,
    model: str | None,
) -> None:
    """Measure each op beside what this machine's memory and arithmetic allow."""
    from pelton.cli import bench as command

    command.kernels(isa, threads, ops, types, rows, seconds, kv_dtype, model)


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
