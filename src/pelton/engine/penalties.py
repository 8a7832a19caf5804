"""What a sequence's own tokens do to the logits of its next one: counts for the penalties, the DRY penalty, bans."""

from __future__ import annotations

import math
from array import array
from collections import Counter

import numpy as np

from pelton.engine.batch import Row
from pelton.engine.sequence import Sequence
from pelton.ops.data import F32, I32
from pelton.request import SamplingParams

LONGEST_REPEAT = 256
"""The DRY penalty grows no more beyond a repeat of so many tokens."""
LARGEST_PENALTY = 1e9
"""What the DRY penalty takes from a logit at most."""


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


def has_counted_penalty(params: SamplingParams) -> bool:
    """Is there a penalty that looks at counts?"""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def has_changing_additions(params: SamplingParams) -> bool:
    """May `additions` differ from token to token?"""
    return params.dry_multiplier > 0 or bool(params.bad_words) or params.min_tokens > 0


def additions(row: Row) -> tuple[I32, F32]:
    """What is added to which logits: the DRY penalty, logit_bias, bans; a token may stand more than once."""
    sequence, offset, _ = row
    request = sequence.group.request
    params = request.sampling
    ids, values = list(params.logit_bias), list(params.logit_bias.values())
    banned = list(_bad_word_ends(row)) if params.bad_words else []
    if sequence.num_output + offset < params.min_tokens:
        banned += sequence.group.end_ids
    ids += banned
    values += [-math.inf] * len(banned)
    rest = np.array(ids, np.int32), np.array(values, np.float32)
    if params.dry_multiplier <= 0:
        return rest
    context = np.array(sequence.tokens + sequence.draft[:offset], np.int32)
    dry = dry_penalty(context, params, sequence.group.dry_breakers)
    return np.concatenate([dry[0], rest[0]]), np.concatenate([dry[1], rest[1]])


def _bad_word_ends(row: Row) -> set[int]:
    """The tokens that would complete a bad word. Only the output counts."""
    sequence, offset, _ = row
    longest = max(map(len, sequence.group.request.bad_words_ids), default=1) - 1
    first = max(sequence.num_prompt, len(sequence.tokens) - longest)
    output = tuple(sequence.tokens[first:] + sequence.draft[:offset])
    return {
        last
        for *head, last in sequence.group.request.bad_words_ids
        if len(head) <= len(output) and tuple(head) == output[len(output) - len(head) :]
    }


def dry_penalty(context: I32, params: SamplingParams, breakers: frozenset[int]) -> tuple[I32, F32]:
    """Tokens that would go on with a repeat, and what is added to their logits.

    Where the last k tokens stand earlier in the context, k as large as it may be but with no breaker among them, the
    token behind them there gets -multiplier * base ** (k - allowed_length), if k is at least allowed_length and the
    token is no breaker; the largest k counts. Source: the DRY sampler of text-generation-webui (p-e-w, 2024), with
    llama.cpp's exception for breakers.
    """
    if params.dry_penalty_last_n >= 0:
        context = context[max(0, len(context) - params.dry_penalty_last_n) :]
    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
    if len(context) < 2 or int(context[-1]) in breakers:
        return nothing
    ends = np.flatnonzero(context[:-1] == context[-1])
    lengths = np.ones(len(ends), np.int64)
    alive = np.arange(len(ends))
    for back in range(1, min(LONGEST_REPEAT, len(context))):
        token = context[len(context) - 1 - back]
        alive = alive[ends[alive] >= back]
        alive = alive[context[ends[alive] - back] == token]
        if not len(alive) or int(token) in breakers:
            break
        lengths[alive] += 1
    is_long = lengths >= params.dry_allowed_length
    tokens, places = np.unique(context[ends[is_long] + 1], return_inverse=True)
    longest = np.zeros(len(tokens), np.int64)
    np.maximum.at(longest, places, lengths[is_long])
    is_free = np.array([int(token) not in breakers for token in tokens], bool)
    exponents = (longest - params.dry_allowed_length).astype(np.float64)
    with np.errstate(over="ignore"):
        penalties = np.minimum(params.dry_multiplier * np.float64(params.dry_base) ** exponents, LARGEST_PENALTY)
    return tokens[is_free].astype(np.int32), -penalties[is_free].astype(np.float32)
