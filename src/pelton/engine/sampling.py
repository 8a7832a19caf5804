"""Per-sequence sampling parameters -> arrays, one row per token to draw. What a backend does with them is defined in
`ops.sampling`."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.backends.base import SampleArrays, greedy_rows
from pelton.engine.batch import Row
from pelton.engine.constraints import Masks
from pelton.engine.penalties import History, additions, has_changing_additions, has_counted_penalty
from pelton.ops.data import I32
from pelton.request import SamplingParams

_NO_IDS = np.empty(0, np.int32)
_NO_ADDITIONS = (_NO_IDS, np.empty(0, np.float32))
_SEED_MASK = (1 << 64) - 1


class Sampling:
    """Makes a step's `SampleArrays`. What does not change between steps with the same rows is made once."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[Row] = []
        self._static: SampleArrays = _columns([], [])
        self._has_penalties = self._has_additions = self._has_mirostat = False

    def arrays(self, rows: list[Row], masks: Future[Masks] | None = None) -> SampleArrays:
        """The parameters of each logit row. Where `rows` are the same object as before, their positions in the output
        are taken to be advanced in place. All that depends on a sequence's output is as if what the row's draft has
        before it were output. `masks`: one row for each of `rows` that has a constraint, in their order."""
        changed: dict[str, Any] = {}
        if rows is not self._rows:
            if rows != self._rows:
                self._prepare(rows)
            self._rows = rows
            position = np.array([sequence.num_output + offset for sequence, offset, _ in rows], np.int32)
            self._static = replace(self._static, position=position)
        if self._has_penalties:
            changed |= _histories(rows)
        if self._has_additions:
            changed |= _additions(rows)
        if self._has_mirostat:
            changed["mirostat_mu"] = np.array([row.sequence.mu for row in rows], np.float32)
        if masks is not None:
            changed |= _masks(self._static, rows, masks.result())
        return replace(self._static, **changed) if changed else self._static

    @property
    def is_lasting(self) -> bool:
        """Are the last arrays, advanced, those of the next step with the same rows? But for masks of grammars."""
        return not (self._has_penalties or self._has_additions or self._has_mirostat)

    def _prepare(self, rows: list[Row]) -> None:
        params = list(map(_params, rows))
        self._static = _columns(rows, params)
        self._has_mirostat = any(p.mirostat_mode for p in params)
        self._has_penalties = any(map(has_counted_penalty, params))
        self._has_additions = any(map(has_changing_additions, params))
        if not self._has_additions and any(p.logit_bias for p in params):
            self._static = replace(self._static, **_additions(rows))
        if any(p.allowed_token_ids is not None for p in params):
            self._static = replace(self._static, **self._allowed(params))

    def _allowed(self, params: list[SamplingParams]) -> dict[str, Any]:
        """The masks of rows with `allowed_token_ids`."""
        masks: list[npt.NDArray[np.uint32]] = []
        numbers: list[int] = []
        for each in params:
            numbers.append(-1 if each.allowed_token_ids is None else len(masks))
            if each.allowed_token_ids is not None:
                masks.append(bit_row(each.allowed_token_ids, self._vocab_size))
        return {"masks": np.stack(masks), "mask_rows": np.array(numbers, np.int32)}


def _params(row: Row) -> SamplingParams:
    """What the row asks for."""
    group = row.sequence.group
    sampling = group.request.sampling
    if group.beams is not None and row.target < 0:
        return SamplingParams(temperature=0.0, logprobs=max(group.beams.num_candidates, sampling.logprobs or 0))
    return sampling if row.target < 0 else SamplingParams(temperature=0.0, logprobs=sampling.prompt_logprobs)


def bit_row(ids: Rows[int], vocab_size: int) -> npt.NDArray[np.uint32]:
    """[ceil(vocab / 32)] with the bits of these tokens set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _columns(rows: list[Row], params: list[SamplingParams]) -> SampleArrays:
    def column(values: Rows[float], kind: type[np.generic]) -> npt.NDArray[Any]:
        return np.array(values, kind)

    def mirostat(name: str) -> npt.NDArray[Any]:
        return column([getattr(p, name) if p.mirostat_mode else 0.0 for p in params], np.float32)

    return replace(
        greedy_rows(len(rows)),
        targets=column([row.target for row in rows], np.int32),
        temperature=column([p.temperature for p in params], np.float32),
        top_p=column([p.top_p for p in params], np.float32),
        min_p=column([p.min_p for p in params], np.float32),
        top_k=column([p.top_k for p in params], np.int32),
        typical_p=column([p.typical_p for p in params], np.float32),
        top_n_sigma=column([p.top_n_sigma for p in params], np.float32),
        xtc_probability=column([p.xtc_probability for p in params], np.float32),
        xtc_threshold=column([p.xtc_threshold for p in params], np.float32),
        mirostat_tau=mirostat("mirostat_tau"),
        mirostat_eta=mirostat("mirostat_eta"),
        chain=column([row.offset > 0 and p.mirostat_mode != 0 for row, p in zip(rows, params, strict=True)], np.uint8),
        seed=column([(p.seed or 0) & _SEED_MASK for p in params], np.uint64),
        choice=column([row.sequence.choice for row in rows], np.int32),
        repetition=column([p.repetition_penalty for p in params], np.float32),
        presence=column([p.presence_penalty for p in params], np.float32),
        frequency=column([p.frequency_penalty for p in params], np.float32),
        num_logprobs=column([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
    )


def _masks(static: SampleArrays, rows: list[Row], masks: Masks) -> dict[str, Any]:
    """The masks of grammars, and of rows with `allowed_token_ids`; a row that has both may have what both allow."""
    numbers = np.full(len(rows), -1, np.int32)
    constrained = np.flatnonzero([row.sequence.constraint is not None and row.target < 0 for row in rows])
    numbers[constrained] = np.arange(len(constrained))
    if static.masks is not None and static.mask_rows is not None:
        for row in np.flatnonzero(static.mask_rows >= 0).tolist():
            allowed = static.masks[static.mask_rows[row]]
            if numbers[row] >= 0:
                masks[numbers[row]] &= allowed
            else:
                numbers[row] = len(masks)
                masks = np.vstack([masks, allowed])
    return {"masks": masks, "mask_rows": numbers}


def _offsets(lists: Rows[npt.NDArray[Any]]) -> I32:
    return np.cumsum([0, *map(len, lists)], dtype=np.int32)


def _additions(rows: list[Row]) -> dict[str, Any]:
    entries = [additions(row) if row.target < 0 else _NO_ADDITIONS for row in rows]
    return {
        "bias_offsets": _offsets([ids for ids, _ in entries]),
        "bias_ids": np.concatenate([ids for ids, _ in entries]),
        "bias_values": np.concatenate([values for _, values in entries]),
    }


def _histories(rows: list[Row]) -> dict[str, Any]:
    ids: list[I32] = []
    counts: list[I32] = []
    for sequence, offset, target in rows:
        if target >= 0 or not has_counted_penalty(sequence.group.request.sampling):
            ids.append(_NO_IDS)
            counts.append(_NO_IDS)
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
