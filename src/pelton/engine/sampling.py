"""Per-sequence sampling parameters -> arrays, one row per token to draw. What a backend does with them is defined in
`ops.sampling`."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.backends.base import SampleArrays
from pelton.engine.batch import Row
from pelton.engine.sequence import Sequence
from pelton.ops.data import F32, I32
from pelton.request import SamplingParams

_NO_ENTRIES = (np.empty(0, np.int32), np.empty(0, np.float32))
_SEED_MASK = (1 << 64) - 1


class History:
    """How often each token stands in a sequence's output; 0 for tokens that stand in the prompt alone.

    Grows with the sequence: `update` reads the tokens that are new. Prompt tokens count for the repetition penalty
    alone, so without one they are left out.
    """

    def __init__(self, sequence: Sequence) -> None:
        has_prompt = sequence.group.request.sampling.repetition_penalty != 1
        prompt = np.unique(sequence.group.request.prompt_ids) if has_prompt else np.empty(0)
        self._index = {int(token): index for index, token in enumerate(prompt)}
        self._ids = np.zeros(2 * len(prompt) + 64, np.int32)
        self._ids[: len(prompt)] = prompt
        self._counts = np.zeros_like(self._ids)
        self._num_read = 0

    def update(self, sequence: Sequence, num_drafted: int = 0) -> tuple[I32, I32]:
        """The distinct tokens and their counts, read-only until the next call. `num_drafted` tokens of the draft
        count as output."""
        for token in sequence.tokens[sequence.num_prompt + self._num_read :]:
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token
            self._counts[index] += 1
        self._num_read = sequence.num_output
        ids, counts = self._ids[: len(self._index)], self._counts[: len(self._index)]
        return self._with_draft(sequence.draft[:num_drafted], ids, counts) if num_drafted else (ids, counts)

    def _with_draft(self, draft: array[int], ids: I32, counts: I32) -> tuple[I32, I32]:
        more = Counter(draft)
        new = [token for token in more if token not in self._index]
        counts = np.concatenate([counts, np.array([more[token] for token in new], np.int32)])
        for token in more.keys() - set(new):
            counts[self._index[token]] += more[token]
        return np.concatenate([ids, np.array(new, np.int32)]), counts


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


class Sampling:
    """Makes a step's `SampleArrays`. What does not change between steps with the same rows is made once."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._static: SampleArrays = _columns([])
        self._has_penalties = self._has_draws = False
        self._bans: list[bool] | None = None

    def arrays(self, rows: list[Row]) -> SampleArrays:
        """The parameters of each logit row. All that depends on a sequence's output is as if what the row's draft has
        before it were output."""
        if rows != self._rows:
            self._prepare(rows)
        if self._bans is not None:
            self._renew_bias(rows)
        changed: dict[str, Any] = {}
        if self._has_draws:
            changed["position"] = np.array([sequence.num_output + offset for sequence, offset in rows], np.int32)
        if self._has_penalties:
            changed |= _histories(rows)
        return replace(self._static, **changed) if changed else self._static

    def _prepare(self, rows: list[Row]) -> None:
        params = [row.sequence.group.request.sampling for row in rows]
        self._rows = list(rows)
        self._static = _columns(rows)
        self._has_draws = any(p.temperature > 0 for p in params)
        self._has_penalties = any(map(_has_penalty, params))
        self._bans = [] if any(p.logit_bias or p.min_tokens for p in params) else None

    def _renew_bias(self, rows: list[Row]) -> None:
        """Make the bias again where a row has just reached its `min_tokens`."""
        bans = [s.num_output + offset < s.group.request.sampling.min_tokens for s, offset in rows]
        if bans != self._bans:
            self._bans = bans
            entries = [_bias(row.sequence, is_banned) for row, is_banned in zip(rows, bans, strict=True)]
            self._static = replace(
                self._static,
                bias_offsets=_offsets([ids for ids, _ in entries]),
                bias_ids=np.concatenate([ids for ids, _ in entries]),
                bias_values=np.concatenate([values for _, values in entries]),
            )


def _columns(rows: list[Row]) -> SampleArrays:
    params = [row.sequence.group.request.sampling for row in rows]

    def column(values: list[float] | list[int], kind: type[np.generic]) -> npt.NDArray[Any]:
        return np.array(values, kind)

    no_entries = np.zeros(len(rows) + 1, np.int32)
    return SampleArrays(
        targets=column([-1] * len(rows), np.int32),
        temperature=column([p.temperature for p in params], np.float32),
        top_p=column([p.top_p for p in params], np.float32),
        min_p=column([p.min_p for p in params], np.float32),
        top_k=column([p.top_k for p in params], np.int32),
        seed=column([(p.seed or 0) & _SEED_MASK for p in params], np.uint64),
        choice=column([row.sequence.choice for row in rows], np.int32),
        position=np.zeros(len(rows), np.int32),
        repetition=column([p.repetition_penalty for p in params], np.float32),
        presence=column([p.presence_penalty for p in params], np.float32),
        frequency=column([p.frequency_penalty for p in params], np.float32),
        history_offsets=no_entries,
        history_ids=_NO_ENTRIES[0],
        history_counts=_NO_ENTRIES[0],
        bias_offsets=no_entries,
        bias_ids=_NO_ENTRIES[0],
        bias_values=_NO_ENTRIES[1],
        num_logprobs=column([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
    )


def _offsets(lists: Rows[npt.NDArray[Any]]) -> I32:
    return np.cumsum([0, *map(len, lists)], dtype=np.int32)


def _bias(sequence: Sequence, is_banned: bool) -> tuple[I32, F32]:
    """A row's logit bias, with the tokens that would end it banned while it is shorter than `min_tokens`."""
    bias = dict(sequence.group.request.sampling.logit_bias)
    if is_banned:
        bias |= dict.fromkeys(sequence.group.end_ids, -math.inf)
    return np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)


def _histories(rows: list[Row]) -> dict[str, Any]:
    ids: list[I32] = []
    counts: list[I32] = []
    for sequence, offset in rows:
        if not _has_penalty(sequence.group.request.sampling):
            ids.append(_NO_ENTRIES[0])
            counts.append(_NO_ENTRIES[0])
            continue
        if sequence.history is None:
            sequence.history = History(sequence)
        row_ids, row_counts = sequence.history.update(sequence, offset)
        ids.append(row_ids)
        counts.append(row_counts)
    return {
        "history_offsets": _offsets(ids),
        "history_ids": np.concatenate(ids),
        "history_counts": np.concatenate(counts),
    }
