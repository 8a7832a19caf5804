"""`pelton pull | list | show | rm`."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.table import Table

from pelton import config
from pelton.formats import checkpoint
from pelton.formats.digest import of_model
from pelton.hub.pull import pull as fetch
from pelton.hub.store import Store
from pelton.progress.display import Display


def size_text(num_bytes: int) -> str:
    """A size for people, in decimal units as disks and hubs count."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


def pull(name: str) -> None:
    """Fetch a model and say where it lies."""
    with Display() as display:
        path = fetch(name, config.load().hub, display)
    click.echo(f"{name} is here: {path}")


def list_models() -> None:
    """One line per model of the store."""
    store = Store(config.load().hub)
    entries = store.list()
    if not entries:
        click.echo("There are no models yet. `pelton pull smollm2` fetches a small one.")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("name", "size", "packed", "files", "from"):
        justify: Literal["left", "right"] = "left" if name in {"name", "from"} else "right"
        table.add_column(name, justify=justify, no_wrap=name == "name")
    for entry in entries:
        packed = store.packed.model_bytes(of_model([file.sha256 for file in entry.files]))
        table.add_row(entry.name, size_text(entry.size), size_text(packed), str(len(entry.files)), entry.source)
    Console().print(table)
    if packed := store.packed.num_bytes:
        limit = size_text(store.packed.limit)
        click.echo(f"{size_text(packed)} of packed weights, of at most {limit}, are in {store.packed.folder}")
    if prefixes := store.prefixes.num_bytes:
        limit = size_text(store.prefixes.limit)
        click.echo(f"{size_text(prefixes)} of cached prefixes, of at most {limit}, are in {store.prefixes.folder}")


def show(name: str) -> None:
    """What a model is, from its file's own metadata."""
    path = Store(config.load().hub).resolve(name)
    opened = checkpoint.open(path)
    click.echo("\n".join(f"{label + ':':<15}{value}" for label, value in _facts(path, opened)))


def _facts(path: Path, opened: checkpoint.Checkpoint) -> list[tuple[str, str]]:
    metadata = opened.metadata
    arch = str(metadata.get("general.architecture", "?"))
    types = Counter[str]()
    for tensor in opened.tensors.values():
        types[tensor.type.name] += tensor.data.nbytes
    parameters = sum(prod(tensor.shape) for tensor in opened.tensors.values())
    facts = [
        ("name", str(metadata.get("general.name", "?"))),
        ("architecture", arch),
        ("parameters", f"{parameters / 1e6:.1f} million"),
        ("size", size_text(sum(types.values()))),
        ("types", ", ".join(f"{name} {size_text(size)}" for name, size in types.most_common())),
        ("context", f"{metadata.get(f'{arch}.context_length', '?')} tokens"),
        ("layers", str(metadata.get(f"{arch}.block_count", "?"))),
        ("width", str(metadata.get(f"{arch}.embedding_length", "?"))),
        ("tokenizer", f"{metadata.get('tokenizer.ggml.model', '?')} {metadata.get('tokenizer.ggml.pre', '')}".strip()),
        ("chat template", "yes" if "tokenizer.chat_template" in metadata else "no"),
        ("license", str(metadata.get("general.license", "?"))),
        ("file", str(path)),
    ]
    return [(label, value) for label, value in facts if not value.startswith("?")]


def remove(names: tuple[str, ...]) -> None:
    """Remove models from the store."""
    store = Store(config.load().hub)
    for name in names:
        store.remove(name)
        click.echo(f"{name} is removed")
