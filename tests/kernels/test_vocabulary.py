"""The table of a vocabulary's tokens, filled from files that may have been made to harm."""

from __future__ import annotations

import time

import numpy as np

from pelton import _core

FACTOR = 0x9E3779B97F4A7C15


def test_no_choice_of_tokens_makes_the_table_slow() -> None:
    """Texts of eight bytes whose products with a well-known factor end in the same bits, half of them upon half: what
    a table that hashes so takes a second for. With a hash that nobody knows they are like any others."""
    place = np.arange(4_000_000, dtype=np.uint64) * np.uint64(2654435761) << np.uint64(20)
    words = ((place ^ place >> np.uint64(32)) * np.uint64(pow(FACTOR, -1, 1 << 64))) ^ np.uint64(8)
    words = np.unique(words[words & np.uint64(0x8080808080808080) == 0])
    data = np.stack([np.full_like(words, 8), words], axis=1).view(np.uint8).ravel()
    began = time.thread_time()
    vocabulary = _core.Vocabulary(data, words.size)
    assert time.thread_time() - began < 0.2
    assert [vocabulary.id_of(vocabulary.text(id)) for id in (0, 1, words.size - 1)] == [0, 1, words.size - 1]
    assert words.size > 15_000
