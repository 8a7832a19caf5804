"""Sampling in plain NumPy: the definition of what a backend draws.

The chain of one row, from raw logits:

1. Logprobs, where wanted, are log softmax of the raw logits; the likeliest are listed, ties to the lowest id.
2. Penalties. Repetition: the logit of each token in prompt or output is divided by the penalty if positive, else
   multiplied. Then presence is subtracted once, and frequency times its count, for each token in the output.
3. `logit_bias` is added; -inf bans a token.
4. Tokens that the row's mask does not allow become -inf.
5. Temperature below 1e-5: the likeliest token, ties to the lowest id. The chain ends here.
6. Weights: w = floor(2^30 exp((logit - largest) / temperature)), integers: what is summed and compared from here on
   is exact, whatever the order of summation. (A token less likely than the likeliest by 2^30 has weight 0.)
7. Order the tokens by (logit descending, id ascending). top-k keeps the first k; top-p the shortest run
   that then has at least top_p of the weight that top-k has left; min-p those with w >= min_p 2^30.
8. The draw: 64 random bits u name the token, in ascending order of ids, in which the running sum of the kept weights
   passes floor(u total / 2^64).

The bits come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = seed,
counter = (output position, choice, draw, 0), the first two words of its output, low word first. Draw 0 is
the token's own. So a draw depends on nothing but its key.

Arithmetic is float32 but for the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pelton.ops.data import F32, I32, U8

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy."""

BAD_LOGITS = 1
"""The logits of a row hold NaN or +inf, perhaps only once penalties have enlarged them, or nothing but -inf: the model
has broken down on this input."""
NO_TOKEN = 2
"""Bias and masks together allow no token."""


@dataclass(frozen=True)
class SampleArrays:
    """Per-row sampling parameters of the R rows of `logit_rows`. Sparse lists are CSR: row r owns entries
    offsets[r] .. offsets[r+1]-1. Temperature 0 is greedy. The chain stands above.

    Rows of one sequence may follow each other: each then stands for a position whose drafted tokens before it are
    taken for accepted, in all that is given here. No row depends on another's draw.
    """

    targets: I32  # -1: draw; else draw nothing: this token's logprob is asked for
    temperature: F32
    top_p: F32
    min_p: F32
    top_k: I32  # 0: all
    seed: npt.NDArray[np.uint64]
    choice: I32
    position: I32  # output position: 0 for the first generated token
    repetition: F32
    presence: F32
    frequency: F32
    history_offsets: I32  # [R + 1] tokens that penalties look at
    history_ids: I32
    history_counts: I32  # times in the output; 0: in the prompt only
    bias_offsets: I32  # [R + 1] logit_bias; -inf bans a token
    bias_ids: I32
    bias_values: F32
    num_logprobs: I32  # [R] likeliest tokens to report; 0: the drawn one's logprob alone, -1: none
    masks: npt.NDArray[np.uint32] | None = None  # [R, ceil(vocab/32)] bits of allowed tokens
    mask_rows: I32 | None = None  # [R] row of `masks` for each row, -1: none


class Sampled(NamedTuple):
    """What sampling drew. Logprobs are of the raw model distribution (before penalties, bias, temperature).

    A row whose `errors` entry is not 0 drew nothing: its id is 0 and means nothing.
    """

    ids: I32  # [R] drawn, or the row's target
    logprobs: F32  # [R] of the drawn ids; zeros where none were wanted
    top_ids: I32  # [R, largest num_logprobs]: descending, ties to the lowest id; zeros behind a row's own number
    top_logprobs: F32
    errors: U8  # [R] BAD_LOGITS, NO_TOKEN, or 0


def philox(seed: int, position: int, choice: int, draw: int) -> int:
    """64 random bits, keyed."""
    key = [seed & 0xFFFFFFFF, seed >> 32]
    counter = [position, choice, draw, 0]
    for _ in range(10):
        left, right = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            right >> 32 ^ counter[1] ^ key[0],
            right & 0xFFFFFFFF,
            left >> 32 ^ counter[3] ^ key[1],
            left & 0xFFFFFFFF,
        ]
        key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return counter[0] | counter[1] << 32


def no_samples(num_rows: int, params: SampleArrays) -> Sampled:
    """Results of the right shapes, zeros, to be filled in."""
    most = max((0, *params.num_logprobs.tolist()))
    return Sampled(
        ids=np.zeros(num_rows, np.int32),
        logprobs=np.zeros(num_rows, np.float32),
        top_ids=np.zeros((num_rows, most), np.int32),
        top_logprobs=np.zeros((num_rows, most), np.float32),
        errors=np.zeros(num_rows, np.uint8),
    )


def sample(logits: F32, params: SampleArrays) -> Sampled:
    """[R, vocab] raw logits -> what each row draws."""
    out = no_samples(len(logits), params)
    for r, raw in enumerate(logits):
        if np.isnan(raw).any() or not np.isfinite(raw.max()):
            out.errors[r] = BAD_LOGITS
            continue
        if params.targets[r] >= 0:
            out.ids[r] = params.targets[r]
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                edited = edit(raw, params, r)
            if not np.isfinite(edited.max()):
                out.errors[r] = NO_TOKEN if edited.max() == -np.inf else BAD_LOGITS
                continue
            out.ids[r] = draw(edited, params, r)
        wanted = int(params.num_logprobs[r])
        if wanted >= 0:
            logprobs = log_softmax(raw)
            top = _descending(raw)[:wanted]
            out.logprobs[r] = logprobs[out.ids[r]]
            out.top_ids[r, :wanted], out.top_logprobs[r, :wanted] = top, logprobs[top]
    return out


def log_softmax(raw: F32) -> F32:
    """[vocab] -> [vocab]."""
    x = raw.astype(np.float64) - raw.max()
    logprobs: F32 = (x - np.log(np.exp(x).sum())).astype(np.float32)
    return logprobs


def edit(raw: F32, params: SampleArrays, r: int) -> F32:
    """Row r's logits after penalties, bias and mask."""
    logits = raw.copy()
    entries = slice(params.history_offsets[r], params.history_offsets[r + 1])
    ids, counts = params.history_ids[entries], params.history_counts[entries]
    seen = logits[ids]
    seen = np.where(seen > 0, seen / params.repetition[r], seen * params.repetition[r])
    seen = np.where(counts > 0, seen - params.presence[r], seen)
    logits[ids] = seen - params.frequency[r] * counts.astype(np.float32)
    entries = slice(params.bias_offsets[r], params.bias_offsets[r + 1])
    logits[params.bias_ids[entries]] += params.bias_values[entries]
    if params.masks is not None and params.mask_rows is not None and params.mask_rows[r] >= 0:
        words = params.masks[params.mask_rows[r]]
        allowed = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")[: len(logits)]
        logits[allowed == 0] = -np.inf
    return logits


def draw(logits: F32, params: SampleArrays, r: int) -> int:
    """One token of row r's edited logits, of which at least one is finite."""
    if params.temperature[r] < GREEDY_BELOW:
        return int(logits.argmax())
    inverse = np.float32(1) / params.temperature[r]
    weights = np.floor(np.exp((logits - logits.max()) * inverse) * np.float32(2**30)).astype(np.int64)
    kept = np.zeros(len(logits), bool)
    kept[_nucleus(logits, weights, int(params.top_k[r]), float(params.top_p[r]))] = True
    kept &= weights >= np.ceil(float(params.min_p[r]) * 2**30)
    sums = np.where(kept, weights, 0).cumsum()
    bits = philox(int(params.seed[r]), int(params.position[r]), int(params.choice[r]), 0)
    return int(np.searchsorted(sums, bits * int(sums[-1]) >> 64, side="right"))


def _nucleus(logits: F32, weights: npt.NDArray[np.int64], top_k: int, top_p: float) -> npt.NDArray[np.intp]:
    order = _descending(logits)
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        sums = weights[order].cumsum()
        needed = max(1, np.ceil(top_p * float(sums[-1])))
        order = order[: np.searchsorted(sums, needed, side="left") + 1]
    return order


def _descending(logits: F32) -> npt.NDArray[np.intp]:
    """Ids by descending logit, ties to the lowest id."""
    return np.argsort(-logits, kind="stable")
