"""The store as the pool shows it: what is there, with what the files say of themselves."""

from __future__ import annotations

import re
import threading
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pelton.config import HubConfig
from pelton.errors import ModelNotFound, PeltonError
from pelton.formats.digest import of_model
from pelton.hub import catalogue, digests
from pelton.hub.preset import Preset
from pelton.hub.pull import pull
from pelton.hub.store import Entry, Store
from pelton.pool.cards import Report, StoredModel

if TYPE_CHECKING:
    from pelton.formats.checkpoint import Checkpoint

_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 25: "IQ4_NL", 30: "IQ4_XS",
    32: "BF16",
}  # fmt: skip
"""`general.file_type`, as llama.cpp's enumeration of file types numbers them."""


class Shelf:
    """What is in the store. Its methods read the disk: they belong into threads."""

    def __init__(self, config: HubConfig) -> None:
        self._config = config
        self._store = Store(config)
        self._known: dict[tuple[str, str | None], StoredModel] = {}
        """By digest and template of their own: files of one digest say the same."""
        self._lock = threading.Lock()

    def find(self, name: str) -> Entry:
        """The entry of that name; `owner/repo` alone means the one that is here. Raises `ModelNotFound`."""
        try:
            return self._store.show(name)
        except ModelNotFound:
            wanted = re.sub(r"^(hf\.co|huggingface\.co)/", "", name).casefold().removesuffix(":latest")
            entries = [e for e in self._store.list() if wanted in (e.name.casefold(), e.name.casefold().split(":")[0])]
            if len(entries) != 1:
                raise
            return entries[0]

    def entries(self) -> tuple[Entry, ...]:
        """All, by name."""
        return self._store.list()

    def models(self) -> list[StoredModel]:
        """All, by name, with their details."""
        return [self._describe(entry) for entry in self._store.list()]

    def model(self, name: str) -> StoredModel:
        """One of them. Raises `ModelNotFound`."""
        return self._describe(self.find(name))

    def metadata(self, name: str) -> Mapping[str, Any]:
        """All that a model's file says of it. Raises `ModelNotFound` or what is wrong with the file."""
        entry = self.find(name)
        return self._metadata(entry, self._open(entry))

    def source(self, model: str) -> StoredModel:
        """A model of the store, or the file at a path: for those who chose the name, not for clients."""
        path = catalogue.local_file(model)
        if path is None:
            return self.model(model)
        found = digests.known(path, self._config)
        stat = path.stat()
        opened = _open_file(path)
        return StoredModel(
            name=model,
            source=str(path),
            size=stat.st_size,
            digest=of_model([each.sha256 for each in found]) if found else "",
            modified_at=stat.st_mtime,
            **_facts(opened, opened.metadata),
        )

    def source_metadata(self, model: str) -> Mapping[str, Any]:
        """`metadata` of such a model."""
        path = catalogue.local_file(model)
        return self.metadata(model) if path is None else _open_file(path).metadata

    def created(self, model: str) -> int:
        """When a model of the store was given its files, or the file at a path was written: seconds since 1970. 0 for
        what is not here."""
        with suppress(PeltonError, OSError):
            path = catalogue.local_file(model)
            return int(self._store.modified(model) if path is None else path.stat().st_mtime)
        return 0

    def pull(self, name: str, report: Report) -> None:
        """Fetch a model by its name. Raises `ModelNotFound` for what is none, and for a path."""
        pull(catalogue.canonical(name), self._config, report)

    def copy(self, source: str, destination: str) -> None:
        """One more name for a model."""
        self._store.copy(self.find(source).name, destination)

    def remove(self, name: str) -> str:
        """Remove a model; the name that it had."""
        name = self.find(name).name
        self._store.remove(name)
        return name

    def create(self, name: str, base: str, preset: Preset) -> None:
        """A name for the files of `base`, with `preset`. Raises `ModelNotFound`."""
        from pelton.hub import create

        _check_template(preset)
        create.derive(self._store, name, self.find(base), preset)

    def create_of_blob(self, name: str, file: str, sha256: str, preset: Preset) -> None:
        """A name for a file that was sent."""
        from pelton.hub import create

        _check_template(preset)
        create.name_blob(self._store, name, file, sha256, preset)

    def has_blob(self, sha256: str) -> bool:
        """Is a file of that digest here?"""
        return self._store.blob(sha256).is_file()

    def new_blob(self) -> Path:
        """Where a file may be gathered that is sent."""
        return self._store.partial(f"upload-{uuid.uuid4().hex}")

    def take_blob(self, path: Path, sha256: str) -> None:
        """Move a file that was gathered to the others. Raises `HubError` where its digest is another."""
        with self._store.lock([sha256]):
            if not self._store.has(sha256, lambda done, total: None):
                path.replace(self._store.partial(sha256))
                self._store.take_in(sha256, lambda done, total: None)

    @staticmethod
    def _metadata(entry: Entry, opened: Checkpoint) -> Mapping[str, Any]:
        template = None if entry.preset is None else entry.preset.template
        if template is None:
            return opened.metadata
        from pelton.text.chat import with_template

        return with_template(opened.metadata, template)

    def _open(self, entry: Entry) -> Checkpoint:
        return _open_file(self._store.resolve(entry.name))

    def _describe(self, entry: Entry) -> StoredModel:
        digest = of_model([file.sha256 for file in entry.files])
        known = (digest, None if entry.preset is None else entry.preset.template)
        with self._lock:
            found = self._known.get(known)
        if found is None:
            found = self._read(entry, digest)
            if found.problem is None:
                with self._lock:
                    self._known[known] = found
        modified = self._store.modified(entry.name)
        return msgspec.structs.replace(
            found, name=entry.name, source=entry.source, modified_at=modified, preset=entry.preset
        )

    def _read(self, entry: Entry, digest: str) -> StoredModel:
        facts: dict[str, Any] = {"family": "?", "parameters": 0, "quantization": "?", "context": None}
        facts |= {"has_chat_template": False, "license": None}
        try:
            opened = self._open(entry)
        except PeltonError as error:
            facts["problem"] = error.message
        else:
            facts |= _facts(opened, self._metadata(entry, opened))
        return StoredModel(name=entry.name, source=entry.source, size=entry.size, digest=digest, modified_at=0, **facts)


def _check_template(preset: Preset) -> None:
    from pelton.text.template import Template

    if preset.template is not None:
        Template(preset.template).check()


def _open_file(path: Path) -> Checkpoint:
    # Imported here: NumPy's import would delay the start of the first engine process.
    from pelton.formats import checkpoint

    return checkpoint.open(path)


def _facts(opened: Checkpoint, metadata: Mapping[str, Any]) -> dict[str, Any]:
    family = str(metadata.get("general.architecture", "?"))
    context, license = metadata.get(f"{family}.context_length"), metadata.get("general.license")
    return {
        "family": family,
        "parameters": sum(prod(tensor.shape) for tensor in opened.tensors.values()),
        "quantization": _quantization(opened),
        "context": context if isinstance(context, int) else None,
        "has_chat_template": "tokenizer.chat_template" in metadata,
        "license": license if isinstance(license, str) else None,
        "capabilities": _capabilities(metadata),
    }


def _capabilities(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    from pelton.text.infill import can_infill
    from pelton.text.reasoning import tags_of
    from pelton.text.tools.detect import shows_tools

    template = str(metadata.get("tokenizer.chat_template", ""))
    can = {
        "completion": True,
        "tools": shows_tools(template) or "tokenizer.chat_template.tool_use" in metadata,
        "thinking": tags_of(template) is not None,
        "insert": can_infill(metadata),
        "embedding": f"{metadata.get('general.architecture')}.pooling_type" in metadata,
    }
    return tuple(name for name, is_so in can.items() if is_so)


def _quantization(opened: Checkpoint) -> str:
    file_type = opened.metadata.get("general.file_type")
    if isinstance(file_type, int) and file_type in _FILE_TYPES:
        return _FILE_TYPES[file_type]
    sizes = Counter[str]()
    for tensor in opened.tensors.values():
        sizes[tensor.type.name] += tensor.data.nbytes
    return sizes.most_common(1)[0][0] if sizes else "?"
