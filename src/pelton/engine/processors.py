"""Logits processors: found by entry point, run on the rows of the requests that ask for them."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pelton.backends.base import Processing
from pelton.engine.batch import Row
from pelton.engine.sequence import SequenceGroup
from pelton.engine.time_limited import TimeLimited, TookTooLong
from pelton.errors import InternalError, InvalidRequest, PeltonError
from pelton.logits import LogitsProcessor
from pelton.ops.data import F32, I32
from pelton.request import ProcessorCall

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = logging.getLogger(__name__)

GROUP = "pelton.logits_processors"
"""The group of entry points."""


class Processors:
    """Those of an engine; each is loaded when a request first asks for it. Whatever one does runs in a thread of its
    own and may take `timeout` seconds: the engine waits for it, and all requests with it."""

    def __init__(self, vocab_size: int, timeout: float) -> None:
        self._vocab_size = vocab_size
        self._timeout = timeout
        self._threads: dict[str, TimeLimited] = {}
        self._loaded: dict[str, LogitsProcessor] = {}

    def check(self, calls: Iterable[str | ProcessorCall]) -> None:
        """Raise `InvalidRequest` for a processor that is not there, or will not have its arguments."""
        for each in calls:
            call = _call(each)
            processor = self._get(call.name)
            try:
                self._threads[call.name].call(processor.check, call.args)
            except ValueError as error:
                message = f"logits processor {call.name!r}: {error}"
                raise InvalidRequest(message, param="logits_processors") from None
            except Exception as error:
                log.error("logits processor %r cannot check its arguments", call.name, exc_info=error)
                message = f"logits processor {call.name!r} cannot check its arguments: {type(error).__name__}: {error}"
                raise InternalError(message, param="logits_processors") from None

    def _get(self, name: str) -> LogitsProcessor:
        if name not in self._loaded:
            from importlib.metadata import entry_points  # not at the top: a tenth of an engine's imports

            found: dict[str, EntryPoint] = {each.name: each for each in entry_points(group=GROUP)}
            if name not in found:
                message = f"there is no logits processor {name!r}; installed: {', '.join(sorted(found)) or 'none'}"
                raise InvalidRequest(message, param="logits_processors")
            if name not in self._threads:
                self._threads[name] = TimeLimited(f"logits processor {name}", self._timeout)
            try:
                self._loaded[name] = self._threads[name].call(lambda: found[name].load()(self._vocab_size))
            except Exception as error:
                log.error("logits processor %r cannot be loaded", name, exc_info=error)
                raise InternalError(f"logits processor {name!r} cannot be loaded: {error}") from None
        return self._loaded[name]

    def close(self) -> None:
        """End the threads, but for those whose processors do not return."""
        for thread in self._threads.values():
            thread.close()

    def job(self, rows: Sequence[Row]) -> Job | None:
        """The work on a step's rows; None where there is none."""
        if not self._loaded:
            return None
        asking = {
            i: row
            for i, row in enumerate(rows)
            if row.target < 0 and row.sequence.group.request.sampling.logits_processors
        }
        return Job(self._loaded, self._threads, asking) if asking else None


class Job:
    """The processors' work in one step. `failed`: the requests whose processors have raised, and what."""

    def __init__(
        self,
        processors: Mapping[str, LogitsProcessor],
        threads: Mapping[str, TimeLimited],
        rows: Mapping[int, Row],
    ) -> None:
        self._processors = processors
        self._threads = threads
        self._rows = rows
        self.failed: dict[SequenceGroup, PeltonError] = {}

    @property
    def processing(self) -> Processing:
        """For the backend."""
        return Processing(np.array(list(self._rows), np.int32), self._apply)

    def _apply(self, rows: Sequence[int], logits: F32) -> None:
        views = [_View(self._rows[row]) for row in rows]
        for turn in range(max(len(view.calls) for view in views)):
            places: dict[str, list[int]] = {}
            for place, view in enumerate(views):
                if turn < len(view.calls) and view.group not in self.failed:
                    view.args = view.calls[turn].args
                    places.setdefault(view.calls[turn].name, []).append(place)
            for name, chosen in places.items():
                self._run(name, logits, views, chosen)

    def _run(self, name: str, logits: F32, views: Sequence[_View], places: list[int]) -> None:
        """One processor on some of the rows, all at once; after an exception, request by request."""
        result = logits[places]
        groups = {views[place].group for place in places}
        try:
            self._threads[name].call(self._processors[name].apply, result, [views[place] for place in places])
            _check(result)
        except TookTooLong as error:
            log.error("logits processor %r: %s", name, error)
            self.failed.update(dict.fromkeys(groups, InternalError(f"logits processor {name!r} failed: {error}")))
        except Exception as error:
            if len(groups) > 1:
                for group in groups:
                    self._run(name, logits, views, [place for place in places if views[place].group is group])
            else:
                log.error("logits processor %r failed", name, exc_info=error)
                message = f"logits processor {name!r} failed: {type(error).__name__}: {error}"
                self.failed[groups.pop()] = InternalError(message)
        else:
            logits[places] = result


def _check(logits: F32) -> None:
    if np.isnan(logits).any() or (logits == np.inf).any():
        raise ValueError("it made logits that are not numbers")


def _call(call: str | ProcessorCall) -> ProcessorCall:
    return ProcessorCall(name=call) if isinstance(call, str) else call


class _View:
    """A row as its processors see it: a `LogitsRow`."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.group = row.sequence.group
        self.calls = [_call(each) for each in self.group.request.sampling.logits_processors]
        self.args: Mapping[str, Any] = {}

    @property
    def prompt_ids(self) -> I32:
        sequence = self._row.sequence
        return _copy(sequence.tokens[: sequence.num_prompt])

    @property
    def output_ids(self) -> I32:
        sequence, offset, _ = self._row
        return _copy(sequence.tokens[sequence.num_prompt :] + sequence.draft[:offset])


def _copy(tokens: array[int]) -> I32:
    return np.array(tokens, np.int32)
