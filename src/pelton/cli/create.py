"""`pelton create`: a model of the store, or a file, under a name of its own with more to it."""

from __future__ import annotations

import re
from pathlib import Path

import click

from pelton import config, options
from pelton.hub import catalogue, create, modelfile
from pelton.hub.pull import pull
from pelton.hub.store import Store
from pelton.progress.display import Display
from pelton.text.template import Template


def run(name: str, path: Path) -> None:
    """Make what the Modelfile describes. Its FROM is fetched if it is not here; a path begins at the Modelfile's
    folder."""
    described = modelfile.parse(path.read_text(encoding="utf-8"))
    settings = config.load().hub
    store = Store(settings)
    preset = described.preset
    if preset.template is not None:
        Template(preset.template).check()
    local = path.parent / Path(described.base).expanduser()
    if catalogue.is_path(described.base) or (described.base.endswith(".gguf") and local.is_file()):
        sha256 = create.bring(store, local)
        file = re.sub(r"[^A-Za-z0-9._+-]", "_", local.name).lstrip("._+-")
        create.name_blob(store, name, file, sha256, preset)
    else:
        with Display() as display:
            pull(catalogue.canonical(described.base), settings, display)
        create.derive(store, name, store.show(described.base), preset)
    for ignored in options.meaning(preset.parameters).ignored:
        click.echo(f"PARAMETER {ignored} changes nothing here", err=True)
    click.echo(f"{catalogue.canonical(name)} is made")
