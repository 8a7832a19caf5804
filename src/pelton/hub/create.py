"""Models that are made here: a name for a model of the store, or for a file that is brought to it, with a preset."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import msgspec

from pelton import options
from pelton.errors import InvalidRequest, ModelNotFound
from pelton.formats import checkpoint
from pelton.formats.digest import part_paths
from pelton.hub import catalogue
from pelton.hub.modelfile import QUOTES
from pelton.hub.preset import Preset
from pelton.hub.store import Entry, Store, digest_of


def derive(store: Store, name: str, base: Entry, preset: Preset) -> Entry:
    """Name the files of `base`, with what its own preset has and `preset` has not."""
    check(preset)
    return store.derive(name, base, msgspec.structs.replace(preset.over(base.preset), parent=base.name))


def name_blob(store: Store, name: str, file: str, sha256: str, preset: Preset) -> Entry:
    """Name a file that is among the blobs. Raises `InvalidRequest` where it is not there, `FormatError` where it is no
    model."""
    check(preset)
    name = catalogue.canonical(name)
    blob = store.blob(sha256)
    if not blob.is_file():
        raise InvalidRequest(f"there is no blob sha256:{sha256}: send it first", param="files")
    checkpoint.open(blob)
    with suppress(ModelNotFound):
        if [each.sha256 for each in store.show(name).files] != [sha256]:
            store.remove(name)
    with store.lock([sha256]):
        return store.add(name, "made here", [(file, sha256)], preset)


def bring(store: Store, path: Path) -> str:
    """Copy a file to the blobs, if it is not there; its digest. Raises `InvalidRequest` for a part of a model."""
    if len(part_paths(path)) > 1:
        raise InvalidRequest(f"{path} is one of several parts: a model is made of one file", param="from")
    checkpoint.open(path)
    sha256 = digest_of(path)
    with store.lock([sha256]):
        if not store.has(sha256, lambda done, total: None):
            shutil.copyfile(path, store.partial(sha256))
            store.take_in(sha256, lambda done, total: None)
    return sha256


def check(preset: Preset) -> None:
    """Raise `InvalidRequest` for what cannot be kept."""
    options.meaning(preset.parameters, "parameters")
    if unknown := sorted(preset.parameters.keys() - options.NAMES - options.NO_EFFECT):
        raise InvalidRequest(f"there is no parameter {unknown[0][:40]!r}", param="parameters")
    texts = (preset.system, preset.template, *preset.license, *(each.content for each in preset.messages))
    if any(QUOTES in text for text in texts if text is not None):
        raise InvalidRequest(f"three quotes in a row ({QUOTES}) cannot be written in a Modelfile", param="system")
