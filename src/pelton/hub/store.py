"""The local models: content-addressed files and a small manifest per name.

    HOME/blobs/sha256-<64 hex>    a model file, complete and checked: nothing else is ever put here
    HOME/models/<name>.json       a manifest: which files a name means (the name percent-encoded)
    HOME/sets/<64 hex>/           a split model's parts under their own names, as links to blobs
    HOME/partial/<64 hex>         a download under way; beside it its .lock, and the .scratch that it may come out of
    HOME/packed/                  packed weights, made by the engine; see `formats.bounded_folder`
    HOME/prefixes/                cached prefixes, likewise, unless they are kept elsewhere

A file moves to `blobs` by rename after its digest was computed, so a half file never counts as a model. Who
writes or removes a blob holds its lock, across processes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, unquote

import msgspec

from pelton.config import HubConfig
from pelton.errors import FormatError, HubError, ModelNotFound
from pelton.formats.bounded_folder import BoundedFolder
from pelton.formats.digest import Digest, of_model
from pelton.hub import catalogue
from pelton.hub.preset import Preset

FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=200)]
"""A name without a path."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A blob as it was when its digest was computed: while size, mtime and inode stand, so does the digest."""

    name: FileName
    sha256: Digest
    size: int
    mtime_ns: int
    inode: int


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What a name means, and where it came from."""

    name: str
    source: str
    files: Annotated[tuple[StoredFile, ...], msgspec.Meta(min_length=1)]
    preset: Preset | None = None
    """What it brings along besides them."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class Store:
    """The models below `config.home`. Names are those of `catalogue`; aliases mean the same model."""

    def __init__(self, config: HubConfig) -> None:
        self._home = config.home
        self.packed = BoundedFolder(str(config.home / "packed"), int(config.packed_cache_size * 1e9))
        """Where packed weights are kept."""
        prefixes = config.prefix_cache_dir or str(config.home / "prefixes")
        self.prefixes = BoundedFolder(prefixes, int(config.prefix_cache_size * 1e9), "prefix")
        """Where cached prefixes are kept."""

    def list(self) -> tuple[Entry, ...]:
        """All models, by name."""
        entries = []
        for manifest in (self._home / "models").glob("*.json"):
            with suppress(ModelNotFound):  # removed just now
                entries.append(self._read(manifest))
        return tuple(sorted(entries, key=lambda entry: entry.name))

    def show(self, name: str) -> Entry:
        """The manifest of `name`. Raises ModelNotFound."""
        return self._read(self._manifest(name))

    def resolve(self, name: str) -> Path:
        """The file to open for `name` (or for a path to a .gguf file); of a split model the first part.

        Raises ModelNotFound, or FormatError where a blob is not what its manifest says.
        """
        if path := catalogue.local_file(name):
            return path
        entry = self.show(name)
        current = tuple(self._check(entry, file) for file in entry.files)
        if current != entry.files:
            self._write(msgspec.structs.replace(entry, files=current))
        return self.blob(current[0].sha256) if len(current) == 1 else self._set(current) / current[0].name

    def remove(self, name: str) -> None:
        """Forgets `name`; its files go where no other name means them. Raises ModelNotFound."""
        entry = self.show(name)
        with self.lock([file.sha256 for file in entry.files]):
            self._manifest(name).unlink(missing_ok=True)
            kept = {file.sha256 for other in self.list() for file in other.files}
            for file in entry.files:
                if file.sha256 not in kept:
                    self.blob(file.sha256).unlink(missing_ok=True)
            if len(entry.files) > 1 and not {file.sha256 for file in entry.files} <= kept:
                shutil.rmtree(self._set(entry.files), ignore_errors=True)
            if not {file.sha256 for file in entry.files} <= kept:
                digest = of_model([file.sha256 for file in entry.files])
                self.packed.remove_model(digest)
                self.prefixes.remove_model(digest)

    def blob(self, sha256: str) -> Path:
        """Where the file with that digest is, if it is."""
        return self._home / "blobs" / f"sha256-{sha256}"

    def file_of(self, blob: Path) -> StoredFile | None:
        """The record of a blob; None for a path that is none."""
        if blob.parent != (self._home / "blobs").resolve():
            return None
        files = (file for entry in self.list() for file in entry.files)
        return next((file for file in files if self.blob(file.sha256).name == blob.name), None)

    def has(self, sha256: str, progress: Callable[[int, int], None]) -> bool:
        """Is that file here, with the right digest? A wrong one is deleted. Only for who holds its lock."""
        blob = self.blob(sha256)
        if blob.is_file() and digest_of(blob, progress) == sha256:
            return True
        blob.unlink(missing_ok=True)
        return False

    def partial(self, sha256: str) -> Path:
        """Where that file is gathered. Only for who holds its lock."""
        path = self._home / "partial" / sha256
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def lock(self, digests: Sequence[str], waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Holds the locks of these files; `waiting` is called once if another process has one."""
        from filelock import FileLock, Timeout

        with ExitStack() as stack:
            for sha256 in sorted(set(digests)):
                lock = FileLock(self.partial(sha256).with_suffix(".lock"))
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    waiting()
                    lock.acquire()
                stack.callback(lock.release)
            yield

    def take_in(self, sha256: str, progress: Callable[[int, int], None]) -> None:
        """Moves the gathered file to the blobs if its digest is right; else deletes it and raises HubError."""
        partial, blob = self.partial(sha256), self.blob(sha256)
        found = digest_of(partial, progress)
        if found != sha256:
            partial.unlink()
            raise HubError(f"the file that came has SHA-256 {found}, but {sha256} was expected")
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        blob.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(blob)
        scratch_path(partial).unlink(missing_ok=True)

    def add(self, name: str, source: str, files: Sequence[tuple[str, str]], preset: Preset | None = None) -> Entry:
        """Gives a name to blobs that are there, as (file name, digest). Only for who holds their locks."""
        stored = tuple(_stat(self.blob(sha256), file, sha256) for file, sha256 in files)
        entry = Entry(name=name, source=source, files=stored, preset=preset)
        if len(stored) > 1:
            self._link(stored)
        self._write(entry)
        return entry

    def copy(self, source: str, destination: str) -> Entry:
        """Gives the files of `source` one more name; what had it before loses it. Raises ModelNotFound for a source
        that is not here, or a destination that cannot be a name."""
        return self.derive(destination, self.show(source), self.show(source).preset)

    def derive(self, destination: str, base: Entry, preset: Preset | None) -> Entry:
        """Gives the files of a model one more name, which brings along `preset`; what had it before loses it. Raises
        ModelNotFound for what cannot be a name, or where the files have gone."""
        canonical = catalogue.canonical(destination)
        with suppress(ModelNotFound):
            if [file.sha256 for file in self.show(canonical).files] != [file.sha256 for file in base.files]:
                self.remove(canonical)
        with self.lock([file.sha256 for file in base.files]):
            if not all(self.blob(file.sha256).is_file() for file in base.files):
                raise _not_here(base.name)
            entry = msgspec.structs.replace(base, name=canonical, preset=preset)
            self._write(entry)
        return entry

    def modified(self, name: str) -> float:
        """When `name` was given its files: seconds since 1970. Raises ModelNotFound."""
        try:
            return self._manifest(name).stat().st_mtime
        except OSError:
            raise _not_here(name) from None

    def _manifest(self, name: str) -> Path:
        return self._home / "models" / f"{quote(catalogue.canonical(name), safe='')}.json"

    def _read(self, manifest: Path) -> Entry:
        try:
            return msgspec.json.decode(manifest.read_bytes(), type=Entry)
        except (FileNotFoundError, NotADirectoryError):
            raise _not_here(unquote(manifest.stem)) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FormatError(f"{manifest}: not a manifest: {error}") from None

    def _write(self, entry: Entry) -> None:
        manifest = self._manifest(entry.name)
        manifest.parent.mkdir(parents=True, exist_ok=True)
        scratch = manifest.with_suffix(f".{uuid.uuid4().hex}")
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(entry)))
        scratch.replace(manifest)

    def _check(self, entry: Entry, file: StoredFile) -> StoredFile:
        """The file's record, renewed where the blob was touched and its digest is still right."""
        blob = self.blob(file.sha256)
        again = f"`pelton pull {entry.name}` fetches it again"
        if not blob.is_file():
            raise FormatError(f"{blob}: the file of {entry.name!r} is gone; {again}")
        current = _stat(blob, file.name, file.sha256)
        if current != file and (current.size != file.size or digest_of(blob) != file.sha256):
            raise FormatError(f"{blob}: the file of {entry.name!r} has been changed; {again}")
        return current

    def _set(self, files: Sequence[StoredFile]) -> Path:
        return self._home / "sets" / of_model([file.sha256 for file in files])

    def _link(self, files: Sequence[StoredFile]) -> None:
        folder = self._set(files)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            link = folder / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..", "..", "blobs", self.blob(file.sha256).name))


def _not_here(name: str) -> ModelNotFound:
    try:
        name = catalogue.find(name).name
    except ModelNotFound as error:
        return error
    return ModelNotFound(f"the model {name!r} is not here; fetch it with `pelton pull {name}`", param="model")


def _stat(path: Path, name: str, sha256: str) -> StoredFile:
    stat = path.stat()
    return StoredFile(name=name, sha256=sha256, size=stat.st_size, mtime_ns=stat.st_mtime_ns, inode=stat.st_ino)


def scratch_path(partial: Path) -> Path:
    """Where the archive is gathered that the file at `partial` comes out of, if it does. The same lock holds."""
    return partial.with_suffix(".scratch")


def digest_of(path: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> str:
    """SHA-256 of a file."""
    total, done, digest = path.stat().st_size, 0, hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(4 << 20):
            digest.update(chunk)
            done += len(chunk)
            progress(done, total)
    return digest.hexdigest()
