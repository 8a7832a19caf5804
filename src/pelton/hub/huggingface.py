"""The Hugging Face Hub, and servers that speak like it.

The library `huggingface_hub` knows the addresses, the token and what is in a repository; it also honours
HF_TOKEN and HF_HUB_OFFLINE. The bytes are streamed by `download`, because the library throws a half download away.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path, PurePosixPath
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pelton.errors import HubError
from pelton.hub.catalogue import HubSource, Model
from pelton.hub.download import PASSING, Address, first_line, gather, pause
from pelton.hub.source import FileInfo, Progress, RemoteFile, Report

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

ANSWER_SECONDS = 4.0
"""How long the hub may take to say what it has, in all; then the next source is tried."""
DENIED = "the file is gated or private: HF_TOKEN must hold a token of somebody who may have it"
USUAL_QUANTS = ("Q4_K_M", "Q4_0", "Q8_0", "F16", "BF16")
"""What is taken where a name does not say: the first of these that a repository has."""

_QUANT = re.compile(r"(?i)(?:^|[-._/])((?:IQ|Q|TQ|MXFP)\d[A-Z0-9_]*|BF16|F16|F32)(?=[-./]|$)")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_SHA256 = re.compile(r"[0-9a-f]{64}")
T = TypeVar("T")


def find(source: HubSource, model: Model, endpoint: str) -> tuple[RemoteFile, ...]:
    """The files of `source`, their digests and sizes. `endpoint` "": the library's own, HF_ENDPOINT included.

    Raises HubError: no answer in ANSWER_SECONDS, no such repository or file, or another digest than the model's.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import HFValidationError

    base = (endpoint or ENDPOINT).rstrip("/")
    try:
        revision, found = _look_up(source, base, model) if source.file else _choose(source, base)
    except HFValidationError as error:
        raise HubError(first_line(error)) from None
    remote = []
    for path, sha256, size in found:
        if model.sha256 not in (None, sha256):
            raise HubError(f"{path} there has SHA-256 {sha256}, but {model.sha256} was expected")
        info = _info(path, sha256, size)
        url = hf_hub_url(source.repo, path, revision=revision, endpoint=base)
        remote.append(RemoteFile(info, _downloader(url, info, source.repo)))
    return tuple(remote)


def _info(path: str, sha256: str | None, size: int | None) -> FileInfo:
    if sha256 is None or not _SHA256.fullmatch(sha256):
        raise HubError(f"the hub does not say the SHA-256 of {path}")
    try:
        return msgspec.convert({"name": PurePosixPath(path).name, "sha256": sha256, "size": size}, FileInfo)
    except msgspec.ValidationError as error:
        raise HubError(f"the hub has a file that cannot be kept: {path!r:.200}: {error}") from None


def _ask(endpoint: str, question: Callable[[], T]) -> T:
    """The hub's answer, within ANSWER_SECONDS. In a thread: a name lookup cannot be told when to give up."""
    import httpx2
    from huggingface_hub.errors import FileMetadataError, HfHubHTTPError

    until = time.monotonic() + ANSWER_SECONDS / 2
    answers: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def work(num_failures: int = 0) -> None:
        try:
            answers.put((question(), None))
        except BaseException as error:
            if isinstance(error, HfHubHTTPError) and _is_passing(error) and time.monotonic() < until:
                pause(num_failures)
                work(num_failures + 1)
            else:
                answers.put((None, error))

    threading.Thread(target=work, daemon=True, name="hub-metadata").start()
    try:
        answer, failure = answers.get(timeout=ANSWER_SECONDS)
    except Empty:
        raise HubError(f"no answer from {endpoint} within {ANSWER_SECONDS:g} seconds") from None
    if isinstance(failure, httpx2.TransportError):
        raise HubError(f"cannot reach {endpoint}: {first_line(failure)}") from None
    known = (httpx2.HTTPError, HfHubHTTPError, FileMetadataError, OSError)
    if isinstance(failure, known):
        raise HubError(first_line(failure)) from None
    if failure is not None:
        raise failure
    return answer  # type: ignore[return-value]  # there is one where there is no failure


def _is_passing(error: HfHubHTTPError) -> bool:
    return error.response is not None and error.response.status_code in PASSING


Found = tuple[str, list[tuple[str, str | None, int | None]]]
"""A revision, and (path, SHA-256, size) of each file."""


def _look_up(source: HubSource, endpoint: str, model: Model) -> Found:
    """One file by its path (of a split model: all parts)."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    revision, found = "main", []
    for path in _parts(source.file or ""):
        ask = partial(get_hf_file_metadata, hf_hub_url(source.repo, path, endpoint=endpoint))
        metadata = _ask(endpoint, partial(ask, timeout=ANSWER_SECONDS, endpoint=endpoint))
        digest = metadata.etag if _SHA256.fullmatch(metadata.etag or "") else model.sha256
        revision = metadata.commit_hash or revision
        found.append((path, digest, metadata.size))
    return revision, found


def _choose(source: HubSource, endpoint: str) -> Found:
    """The files of a quantisation."""
    from huggingface_hub import HfApi

    ask = partial(HfApi(endpoint=endpoint).model_info, source.repo)
    info = _ask(endpoint, partial(ask, files_metadata=True, timeout=ANSWER_SECONDS))
    files = {file.rfilename: file for file in info.siblings or ()}
    found = []
    for path in choose(tuple(files), source.repo, source.quant):
        if path not in files:
            raise HubError(f"{source.repo} lacks {path}")
        lfs = files[path].lfs
        found.append((path, lfs.sha256 if lfs else None, files[path].size))
    return info.sha or "main", found


def choose(paths: Sequence[str], repo: str, quant: str) -> tuple[str, ...]:
    """Of a repository's files, the model of that quantisation ("": the usual one), all its parts in order.

    Raises HubError that names what there is.
    """
    by_quant: dict[str, list[str]] = {}
    for path in paths:
        name = PurePosixPath(path).name.lower()
        part = _PART.search(path)
        is_model = name.endswith(".gguf") and not name.startswith("mmproj") and "imatrix" not in name
        if is_model and (part is None or int(part[1]) == 1) and (match := _QUANT.search(path)):
            by_quant.setdefault(match[1].upper(), []).append(path)
    usual = next((name for name in USUAL_QUANTS if name in by_quant), None)
    wanted = quant.upper() or usual
    if wanted is None or wanted not in by_quant:
        there = ", ".join(sorted(by_quant)) or "no GGUF files"
        raise HubError(f"{repo} has {there}" + (f", not {wanted}" if wanted else ""))
    if len(by_quant[wanted]) > 1:
        raise HubError(f"{repo} has several files of {wanted}, name one: {', '.join(by_quant[wanted])}")
    return _parts(by_quant[wanted][0])


def _parts(path: str) -> tuple[str, ...]:
    """All parts of the split model whose first part this is; otherwise the path alone."""
    if (match := _PART.search(path)) is None:
        return (path,)
    stem, count = path[: match.start()], int(match[2])
    return tuple(f"{stem}-{i:05d}-of-{match[2]}.gguf" for i in range(1, min(count, 999) + 1))


def _downloader(url: str, info: FileInfo, repo: str) -> Callable[[Path, Report], None]:
    def download(path: Path, report: Report) -> None:
        from huggingface_hub import get_session, get_token

        def tell(done: int) -> None:
            report(
                Progress(source=repo, phase="download", file=info.name, sha256=info.sha256, done=done, total=info.size)
            )

        token = get_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        gather(Address(url, info.size, lambda: nullcontext(get_session()), DENIED, headers), path, tell)

    return download
