"""What an engine does beside its steps once it is loaded: it takes the digest of the model's files where that is not
known yet, and then keeps what makes the next start fast."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pelton.backends.base import Executor, Permit
from pelton.formats.digest import FileDigest, FileStamp, ModelFile, of_model

log = logging.getLogger(__name__)

QUIET = 1.0
"""Seconds without a request before the work begins."""
PATIENCE = 60.0
"""Seconds after which it begins anyway."""
BUSY_WAIT = 0.1
"""Seconds between pieces of work, of some milliseconds each, while requests run."""
_PIECE = 2 << 20


class Background:
    """One thread. `found` are the digests that it took, for whoever looks; `tell` is called as they are there. It
    begins when the work that it comes `after` is done."""

    def __init__(
        self,
        files: Sequence[ModelFile],
        executor: Executor,
        digest: str | None,
        *,
        is_busy: Callable[[], bool],
        tell: Callable[[], None] = lambda: None,
        after: Background | None = None,
    ) -> None:
        self.found: tuple[FileDigest, ...] | None = None
        self._files = files
        self._executor = executor
        self._digest = digest
        self._is_busy = is_busy
        self._tell = tell
        self._end = threading.Event()
        self._last = time.monotonic()
        self._after = after
        self._thread = threading.Thread(target=self._run, name="engine background", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Have it stop at the next piece."""
        self._end.set()

    def _run(self) -> None:
        if self._after is not None:
            self._after._thread.join()
        try:
            if not self._await_quiet():
                return
            if self._digest is None:
                self.found = take_digests(self._files, self._permit)
                if self.found is None:
                    return
                self._digest = of_model([file.sha256 for file in self.found])
                self._tell()
            self._last = time.monotonic()
            self._executor.store(self._digest, self._permit)
        except Exception:
            log.warning("the engine's work in the background failed", exc_info=True)

    def _await_quiet(self) -> bool:
        began = quiet_since = time.monotonic()
        while (now := time.monotonic()) - quiet_since < QUIET and now - began < PATIENCE:
            if self._is_busy():
                quiet_since = now
            if self._end.wait(QUIET / 10):
                return False
        self._last = time.monotonic()
        return True

    def _permit(self) -> bool:
        """Takes half of one core's time at most, and next to nothing while requests run."""
        wait = BUSY_WAIT if self._is_busy() else time.monotonic() - self._last
        is_over = self._end.wait(wait)
        self._last = time.monotonic()
        return not is_over


def known_digest(files: Sequence[ModelFile], known: Sequence[FileDigest]) -> str | None:
    """The model's digest, where those of all its files as they were opened are among the known ones."""
    by_file = {each.file: each.sha256 for each in known}
    digests = [by_file.get(file) for file in files]
    found = [digest for digest in digests if digest is not None]
    return of_model(found) if len(found) == len(digests) else None


def take_digests(files: Sequence[ModelFile], permit: Permit) -> tuple[FileDigest, ...] | None:
    """The digests of files that are still as they were opened when it is done; else None, and None where `permit` says
    so."""
    taken = []
    for file in files:
        digest = _take_digest(file, permit) if file.stamp.is_settled else None
        if digest is None:
            return None
        taken.append(FileDigest(file, digest))
    return tuple(taken)


def _take_digest(file: ModelFile, permit: Permit) -> str | None:
    state = hashlib.sha256()
    try:
        with Path(file.path).open("rb", buffering=0) as opened:
            while permit():
                piece = opened.read(_PIECE)
                state.update(piece)
                if not piece:
                    if FileStamp.of(os.fstat(opened.fileno())) == file.stamp:
                        return state.hexdigest()
                    log.warning(
                        "%s was changed after it was loaded; a server loads it anew once nothing runs", file.path
                    )
                    return None
    except OSError as error:
        log.warning("%s cannot be read any more: %s", file.path, error)
    return None
