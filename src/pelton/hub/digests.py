"""Which digests of model files are known: those of the store's blobs from their manifests, those of other files from
small records that were made when the digest was first taken.

    HOME/digests/<SHA-256 of the path>.json    a file outside the store: its path, stamp and digest
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from pelton.config import HubConfig
from pelton.formats.digest import FileDigest, FileStamp, ModelFile, part_paths
from pelton.hub.store import Store


def known(path: Path, config: HubConfig) -> tuple[FileDigest, ...]:
    """The digests that are known of the files of the model whose (first) file that is."""
    return tuple(_known(part_paths(path), config))


def remember(digests: Iterable[FileDigest], config: HubConfig) -> None:
    """Keep digests for later starts. Records of files that are gone go. Nothing that fails is an error: the digest is
    then taken again."""
    folder = config.home / "digests"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.json"):
            if (record := _read(path)) is None or not Path(record.file.path).exists():
                path.unlink(missing_ok=True)
        for digest in digests:
            path = Path(digest.file.path).absolute()
            record = FileDigest(ModelFile(str(path), digest.file.stamp), digest.sha256)
            scratch = _record(path, config).with_suffix(f".{uuid.uuid4().hex}")
            scratch.write_bytes(msgspec.json.encode(record))
            scratch.replace(_record(path, config))


def _known(paths: Iterable[Path], config: HubConfig) -> Iterator[FileDigest]:
    store = Store(config)
    for path in paths:
        try:
            file = ModelFile(str(path), FileStamp.of(path.stat()))
            stored = store.file_of(path.resolve())
        except OSError:
            return  # the first that is not there ends them
        record = None if stored is not None else _read(_record(path, config))
        if stored is not None and FileStamp(stored.size, stored.mtime_ns, stored.inode) == file.stamp:
            yield FileDigest(file, stored.sha256)
        elif record is not None and record.file.stamp == file.stamp:
            yield FileDigest(file, record.sha256)


def _record(path: Path, config: HubConfig) -> Path:
    name = hashlib.sha256(str(path.absolute()).encode(errors="surrogateescape")).hexdigest()
    return config.home / "digests" / f"{name}.json"


def _read(path: Path) -> FileDigest | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=FileDigest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
