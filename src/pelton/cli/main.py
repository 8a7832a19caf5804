"""`pelton`: subcommands and their options; `keys_commands` and `bench_commands` have two groups of them. What is
heavy is imported inside the command that needs it."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import click

from pelton import __version__
from pelton.cli.bench_commands import bench
from pelton.cli.keys_commands import keys
from pelton.cli.options import engine_options, server_options
from pelton.errors import PeltonError

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


main.add_command(keys)
main.add_command(bench)
