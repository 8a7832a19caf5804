"""Sampling in plain NumPy: the definition of what a backend draws.

The chain of one row, from raw logits:

1. Logprobs, where wanted, are log softmax of the raw logits; the likeliest are listed, ties to the lowest id. A row
   with a target ends here: that token's logprob and its rank (1 and the number of larger logits) are asked for.
2. Where there are logits processors, the row goes on with what they make of its logits.
3. Penalties. Repetition: the logit of each token in prompt or output is divided by the penalty if positive, else
   multiplied. Then presence is subtracted once, and frequency times its count, for each token in the output.
4. The row's list of additions, in its order; -inf bans a token. (It holds the DRY penalty, logit_bias, and the bans of
   bad words and of end tokens before min_tokens: `engine.sampling` makes it.)
5. Tokens that the row's mask does not allow become -inf.
6. Temperature below 1e-5: the likeliest token, ties to the lowest id. The chain ends here.
7. Weights: w = floor(2^30 exp((logit - largest) / temperature)), integers: what is summed and compared from here on
   is exact, whatever the order of summation. A token of weight 0, less likely than the likeliest by 2^30, is gone.
8. The filters, one after the other on what is left, with W the sum of its weights. Order the tokens by (logit
   descending, id ascending). No filter leaves nothing: where all would go, the first in this order stays.
   - top-k keeps the first k.
   - top-p keeps the shortest run of that order with at least top_p W.
   - min-p keeps w >= min_p 2^30.
   - typical: with the distance d = (largest - logit) / temperature and its mean D = sum(w d) / W, the shortest run by
     |d - D| with at least typical_p W. (d less a constant is the surprise -log p, and D the entropy less the same.
     Meister et al., "Locally Typical Sampling", TACL 2023.)
   - top-n-sigma keeps logits of at least largest - n s, s the standard deviation of all logits that are not -inf.
     (Tang et al., "Top-nsigma: Not All Logits Are You Need", 2024.)
   - XTC: with xtc_probability, of the tokens with w >= xtc_threshold W all but the last go. The coin is the upper 53
     bits of draw 1.
   - mirostat keeps w >= W 2^-mu. (Version 2 of Basu et al., "Mirostat", ICLR 2021, without its re-scaling.)
9. The draw is a race: each token that is left arrives at the time -ln(1 - v) / w, v = (noise + 1/2) / 2^32, and the
   first wins (ties: the lowest id). Times are of an exponential distribution with the rate w, so a token wins with
   w / W. A token's noise is a 32-bit hash of its id and the draw's 64 bits, whatever else is left: so two rows with the
   same key draw the same token about as often as their distributions allow. (Gumbel-max, without the logarithm of w.)
10. Mirostat learns: mu becomes mu - eta (s - tau), s = -log2(w / W) of the drawn token. A row that continues the one
   before it starts with the mu that that one ends with: this is all that goes from row to row.

The bits come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = seed,
counter = (output position, choice, draw, 0), the first two words of its output, low word first. Draw 0 is
the token's own, draw 1 XTC's coin. So a draw depends on nothing but its key.

Arithmetic is float32 but for the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pelton.ops.data import F32, I32, U8

Ids = npt.NDArray[np.intp]
Weights = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

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
    taken for accepted, in all that is given here. No row depends on another's draw, but for mirostat's mu.
    """

    targets: I32  # -1: draw; else draw nothing: this token's logprob is asked for
    temperature: F32
    top_p: F32
    min_p: F32
    top_k: I32  # 0: all
    typical_p: F32  # 1: all
    top_n_sigma: F32  # 0: all
    xtc_probability: F32
    xtc_threshold: F32
    mirostat_tau: F32  # bits; 0: no mirostat
    mirostat_eta: F32
    mirostat_mu: F32  # bits
    chain: U8  # 1: the row continues the one before it
    seed: npt.NDArray[np.uint64]
    choice: I32
    position: I32  # output position: 0 for the first generated token; an array of its own, which may be advanced
    repetition: F32
    presence: F32
    frequency: F32
    history_offsets: I32  # [R + 1] tokens that penalties look at
    history_ids: I32
    history_counts: I32  # times in the output; 0: in the prompt only
    bias_offsets: I32  # [R + 1] additions: a token may stand more than once; -inf bans it
    bias_ids: I32
    bias_values: F32
    num_logprobs: I32  # [R] likeliest tokens to report; 0: the drawn one's logprob alone, -1: none
    masks: npt.NDArray[np.uint32] | None = None  # [R, ceil(vocab/32)] bits of allowed tokens
    mask_rows: I32 | None = None  # [R] row of `masks` for each row, -1: none


class Processing(NamedTuple):
    """Logits processors at work on some rows of a step."""

    rows: I32  # ascending
    apply: Callable[[Sequence[int], F32], None]
    """Changes, in place, the logits [n, vocab] of the n rows that are named. Called with a few rows at a time."""


class Sampled(NamedTuple):
    """What sampling drew. Logprobs are of the raw model distribution (before penalties, bias, temperature).

    A row whose `errors` entry is not 0 drew nothing: its id is 0 and means nothing.
    """

    ids: I32  # [R] drawn, or the row's target
    logprobs: F32  # [R] of the drawn ids; zeros where none were wanted
    top_ids: I32  # [R, largest num_logprobs]: descending, ties to the lowest id; zeros behind a row's own number
    top_logprobs: F32
    ranks: I32  # [R] of targets; zeros elsewhere
    mu: F32  # [R] mirostat's, after the draw
    errors: U8  # [R] BAD_LOGITS, NO_TOKEN, or 0


def greedy_rows(num_rows: int) -> SampleArrays:
    """Rows that take the likeliest token and ask for nothing else: what others are made of with `replace`."""
    zeros, ones = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
    no_ints, no_entries = np.zeros(num_rows, np.int32), np.zeros(num_rows + 1, np.int32)
    return SampleArrays(
        targets=np.full(num_rows, -1, np.int32),
        temperature=zeros,
        top_p=ones,
        min_p=zeros,
        top_k=no_ints,
        typical_p=ones,
        top_n_sigma=zeros,
        xtc_probability=zeros,
        xtc_threshold=zeros,
        mirostat_tau=zeros,
        mirostat_eta=zeros,
        mirostat_mu=zeros,
        chain=np.zeros(num_rows, np.uint8),
        seed=np.zeros(num_rows, np.uint64),
        choice=no_ints,
        position=np.zeros(num_rows, np.int32),
        repetition=ones,
        presence=zeros,
        frequency=zeros,
        history_offsets=no_entries,
        history_ids=np.zeros(0, np.int32),
        history_counts=np.zeros(0, np.int32),
        bias_offsets=no_entries,
        bias_ids=np.zeros(0, np.int32),
        bias_values=np.zeros(0, np.float32),
        num_logprobs=np.full(num_rows, -1, np.int32),
    )


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


def scatter(words: Words) -> Words:
    """A bijection of 32-bit words in which each bit of the input turns half of those of the output (lowbias32 of Chris
    Wellons, "Prospecting for hash functions", 2018)."""
    words = (words ^ words >> np.uint32(16)) * np.uint32(0x7FEB352D)
    words = (words ^ words >> np.uint32(15)) * np.uint32(0x846CA68B)
    return words ^ words >> np.uint32(16)


def noise(ids: Ids, bits: int) -> Words:
    """The tokens' noise in a draw that has these bits."""
    low, high = np.uint32(bits & 0xFFFFFFFF), np.uint32(bits >> 32)
    return scatter(scatter(ids.astype(np.uint32) ^ low) ^ high)


def waiting(noise: Words) -> npt.NDArray[np.float64]:
    """-ln(1 - v), v = (noise + 1/2) / 2^32, by a series that has the same bits everywhere: with 1 - v = 2^e m, m within
    sqrt(2) of 1, ln m = 2 atanh((m - 1) / (m + 1))."""
    m, e = np.frexp(1.0 - (noise + 0.5) * 2.0**-32)
    is_small = m * 2 <= math.sqrt(2)
    m, e = np.where(is_small, m * 2, m), e - is_small
    s = (m - 1) / (m + 1)
    series = np.full(s.shape, 2 / 17)
    for k in range(15, 0, -2):
        series = series * (s * s) + 2 / k
    times: npt.NDArray[np.float64] = -(e * 0.6931471805599453 + s * series)
    return times


def no_samples(num_rows: int, params: SampleArrays) -> Sampled:
    """Results of the right shapes, zeros, to be filled in."""
    most = max((0, *params.num_logprobs.tolist()))
    return Sampled(
        ids=np.zeros(num_rows, np.int32),
        logprobs=np.zeros(num_rows, np.float32),
        top_ids=np.zeros((num_rows, most), np.int32),
        top_logprobs=np.zeros((num_rows, most), np.float32),
        ranks=np.zeros(num_rows, np.int32),
        mu=np.zeros(num_rows, np.float32),
        errors=np.zeros(num_rows, np.uint8),
    )


def sample(logits: F32, params: SampleArrays, processing: Processing | None = None) -> Sampled:
    """[R, vocab] raw logits -> what each row draws."""
    out = no_samples(len(logits), params)
    for r, raw in enumerate(logits):
        out.mu[r] = out.mu[r - 1] if r and params.chain[r] else params.mirostat_mu[r]
        if np.isnan(raw).any() or not np.isfinite(raw.max()):
            out.errors[r] = BAD_LOGITS
            continue
        if params.targets[r] >= 0:
            out.ids[r] = params.targets[r]
            out.ranks[r] = 1 + (raw > raw[params.targets[r]]).sum()
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                edited = edit(processed(raw, r, processing), params, r)
            if not np.isfinite(edited.max()):
                out.errors[r] = NO_TOKEN if edited.max() == -np.inf else BAD_LOGITS
                continue
            out.ids[r], out.mu[r] = draw(edited, params, r, float(out.mu[r]))
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


def processed(raw: F32, r: int, processing: Processing | None) -> F32:
    """Row r's logits after its logits processors."""
    if processing is None or r not in processing.rows:
        return raw
    logits = raw[np.newaxis].copy()
    processing.apply([r], logits)
    result: F32 = logits[0]
    return result


def edit(raw: F32, params: SampleArrays, r: int) -> F32:
    """Row r's logits after penalties, additions and mask."""
    logits = raw.copy()
    entries = slice(params.history_offsets[r], params.history_offsets[r + 1])
    ids, counts = params.history_ids[entries], params.history_counts[entries]
    seen = logits[ids]
    seen = np.where(seen > 0, seen / params.repetition[r], seen * params.repetition[r])
    seen = np.where(counts > 0, seen - params.presence[r], seen)
    logits[ids] = seen - params.frequency[r] * counts.astype(np.float32)
    entries = slice(params.bias_offsets[r], params.bias_offsets[r + 1])
    np.add.at(logits, params.bias_ids[entries], params.bias_values[entries])
    if params.masks is not None and params.mask_rows is not None and params.mask_rows[r] >= 0:
        words = params.masks[params.mask_rows[r]]
        allowed = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")[: len(logits)]
        logits[allowed == 0] = -np.inf
    return logits


def draw(logits: F32, params: SampleArrays, r: int, mu: float = 0.0) -> tuple[int, float]:
    """One token of row r's edited logits, of which at least one is finite, and mirostat's mu after it."""
    if params.temperature[r] < GREEDY_BELOW:
        return int(logits.argmax()), mu
    inverse = np.float32(1) / params.temperature[r]
    weights = np.floor(np.exp((logits - logits.max()) * inverse) * np.float32(2**30)).astype(np.int64)
    order = _descending(logits)
    left = filtered(order[weights[order] > 0], logits, weights, params, r)
    tau, eta = float(params.mirostat_tau[r]), float(params.mirostat_eta[r])
    if tau > 0:
        left = _or_first(left, weights[left] >= float(weights[left].sum()) * 2**-mu)
    left = np.sort(left)
    token = int(left[(waiting(noise(left, _bits(params, r, 0))) / weights[left]).argmin()])
    if tau > 0:
        surprise = -math.log2(float(weights[token]) / float(weights[left].sum()))
        mu -= eta * (surprise - tau)
    return token, mu


def filtered(order: Ids, logits: F32, weights: Weights, params: SampleArrays, r: int) -> Ids:
    """What the filters, from top-k to XTC, leave of tokens in descending order."""
    if params.top_k[r] > 0:
        order = order[: params.top_k[r]]
    if params.top_p[r] < 1:
        order = _run(order, weights, params.top_p[r])
    order = order[weights[order] >= np.ceil(float(params.min_p[r]) * 2**30)]
    if params.typical_p[r] < 1:
        distances = (logits.max() - logits[order]) * (np.float32(1) / params.temperature[r])
        products = (weights[order] * distances.astype(np.float64))[np.argsort(order)]
        expected = np.float32(products.cumsum()[-1] / float(weights[order].sum()))
        nearest = order[np.argsort(np.abs(distances - expected), kind="stable")]
        typical = _run(nearest, weights, params.typical_p[r])
        order = order[np.isin(order, typical)]
    if params.top_n_sigma[r] > 0:
        finite = logits[np.isfinite(logits)].astype(np.float64)
        least = np.float32(float(logits.max()) - float(params.top_n_sigma[r]) * finite.std())
        order = _or_first(order, logits[order] >= least)
    if (_bits(params, r, 1) >> 11) * 2.0**-53 < params.xtc_probability[r]:
        num_top = int((weights[order] >= _share(params.xtc_threshold[r], weights[order])).sum())
        order = order[max(0, num_top - 1) :]
    return order


def _or_first(order: Ids, is_kept: npt.NDArray[np.bool_]) -> Ids:
    return order[is_kept] if is_kept.any() else order[:1]


def _share(share: np.float32, weights: Weights) -> float:
    """The weight that is this share of them all; at least 1."""
    return float(max(1, np.ceil(float(share) * float(weights.sum()))))


def _run(order: Ids, weights: Weights, share: np.float32) -> Ids:
    """The shortest beginning with at least this share of the weight."""
    sums = weights[order].cumsum()
    return order[: np.searchsorted(sums, _share(share, weights[order]), side="left") + 1]


def _bits(params: SampleArrays, r: int, number: int) -> int:
    return philox(int(params.seed[r]), int(params.position[r]), int(params.choice[r]), number)


def _descending(logits: F32) -> Ids:
    """Ids by descending logit, ties to the lowest id."""
    return np.argsort(-logits, kind="stable")
