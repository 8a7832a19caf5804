"""The filters after top-k, top-p and min-p, mirostat and logits processors: in the core against the definition, in all
combinations, and what each of them keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton import _core
from pelton.ops.sampling import Processing, SampleArrays, no_samples, sample
from tests.kernels.test_sample import F32, ISAS, in_core, machine, parameters, random_logits

ROWS = 6


def column(*values: float) -> st.SearchStrategy[list[float]]:
    return st.lists(st.sampled_from(values), min_size=ROWS, max_size=ROWS)


PARAMETERS = st.fixed_dictionaries(
    {
        "targets": column(-1, -1, -1, -1, 3),
        "temperature": column(0, 1e-4, 0.3, 1, 2),
        "top_k": column(0, 0, 1, 3, 30),
        "top_p": column(1, 1, 0, 0.5, 0.95),
        "min_p": column(0, 0, 0.1, 1),
        "typical_p": column(1, 1, 0, 0.2, 0.9),
        "top_n_sigma": column(0, 0, 0.01, 1, 3),
        "xtc_probability": column(0, 0, 0.5, 1),
        "xtc_threshold": column(0, 0.02, 0.1, 0.5, 1),
        "mirostat_tau": column(0, 0, 2, 6),
        "mirostat_eta": column(0, 0.1, 1),
        "mirostat_mu": column(-3, 0, 1, 4, 12),
        "chain": column(0, 0, 1),
        "seed": column(1, 2, 2**63),
        "num_logprobs": column(-1, 0, 3),
    }
)


@settings(max_examples=150, deadline=None)
@given(PARAMETERS, st.sampled_from([4, 40, 600]), st.sampled_from([0.0, 0.3, 2.0, 8.0]), st.integers(0, 9))
def test_all_combinations_equal_the_definition(given: dict[str, Any], vocab: int, spread: float, seed: int) -> None:
    logits = random_logits(ROWS, vocab, spread, seed).round(2)  # ties
    logits[seed % ROWS, : vocab // 2] = -np.inf
    params = parameters(ROWS, **given)
    out, expected = in_core(logits, params, 2), sample(logits, params)
    assert out.errors.tolist() == expected.errors.tolist()
    assert out.ids.tolist() == expected.ids.tolist()
    assert out.ranks.tolist() == expected.ranks.tolist()
    np.testing.assert_allclose(out.mu, expected.mu, rtol=1e-6, atol=1e-5)


DRAWS = 6000
PROBABILITIES = np.array([0.3, 0.25, 0.2, 0.1, 0.08, 0.04, 0.02, 0.01])


def drawn(probabilities: F32, **params: float) -> dict[int, float]:
    """How often each token is drawn, as a share; the token ids are shuffled back."""
    places = np.random.default_rng(2).permutation(300)[: len(probabilities)]
    logits = np.full(300, -np.inf, np.float32)
    logits[places] = np.log(probabilities)
    out = in_core(np.tile(logits, (DRAWS, 1)), parameters(DRAWS, **params), 2)
    assert not out.errors.any()
    counts = np.bincount(out.ids, minlength=300)[places]
    assert counts.sum() == DRAWS
    return {i: count / DRAWS for i, count in enumerate(counts) if count}


def assert_shares(shares: dict[int, float], kept: list[int]) -> None:
    assert set(shares) == set(kept)
    total = PROBABILITIES[kept].sum()
    for token, share in shares.items():
        expected = PROBABILITIES[token] / total
        assert abs(share - expected) < 5 * np.sqrt(expected / DRAWS)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"typical_p": 0.4}, [1, 2]),  # surprises 1.20 1.39 1.61 2.30 ..., entropy 1.72
        ({"typical_p": 0.0}, [2]),
        ({"typical_p": 0.98}, [0, 1, 2, 3, 4, 5, 6]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.09}, [3, 4, 5, 6, 7]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.28}, list(range(8))),
        ({"xtc_probability": 0.0, "xtc_threshold": 0.09}, list(range(8))),
        ({"top_k": 4, "xtc_probability": 1.0, "xtc_threshold": 0.09}, [3]),
        ({"mirostat_tau": 3.0, "mirostat_eta": 0.0, "mirostat_mu": 3.4}, [0, 1, 2, 3]),  # 0.1 is 3.3 bits
        ({"mirostat_tau": 3.0, "mirostat_eta": 0.0, "mirostat_mu": -1.0}, [0]),
        ({"top_p": 0.7, "typical_p": 0.99}, [0, 1, 2]),
    ],
    ids=str,
)
def test_a_filter_keeps_what_it_says(params: dict[str, float], kept: list[int]) -> None:
    assert_shares(drawn(PROBABILITIES, **params), kept)


def test_the_likeliest_token_may_be_untypical() -> None:
    shares = drawn(np.array([0.4] + [0.1] * 6), typical_p=0.45)
    assert len(shares) == 5
    assert 0 not in shares


def test_xtc_is_a_coin_of_its_own() -> None:
    shares = drawn(PROBABILITIES, xtc_probability=0.25, xtc_threshold=0.09)
    with_all = PROBABILITIES[0]
    assert abs(shares[0] - 0.75 * with_all) < 5 * np.sqrt(with_all / DRAWS)
    again = drawn(PROBABILITIES, xtc_probability=0.25, xtc_threshold=0.09)
    assert again == shares
    assert drawn(PROBABILITIES, xtc_probability=0.25, xtc_threshold=0.09, seed=8) != shares


def test_top_n_sigma_measures_what_is_not_banned() -> None:
    logits = np.zeros((DRAWS, 1000), np.float32)
    logits[:, ::2] = -1  # mean -0.5, deviation 0.5
    logits[:, 7] = 3
    logits[:, 900:] = -np.inf
    shown = logits[0][np.isfinite(logits[0])]
    few, some = (3 - shown.astype(np.float64).min()) / shown.std() - 0.5, 3 / shown.std() - 0.5
    at = {"temperature": 2.0}
    ids = set(in_core(logits, parameters(DRAWS, top_n_sigma=few, **at), 2).ids.tolist())
    assert all(id == 7 or id % 2 for id in ids)
    assert len(ids) > 100
    assert set(in_core(logits, parameters(DRAWS, top_n_sigma=some, **at), 2).ids.tolist()) == {7}


def test_mirostat_flows_along_its_chain() -> None:
    """Rows of a chain draw what they draw one after the other, also where a tile or a thread ends between them."""
    rows = 70
    logits = random_logits(rows, 500)
    chain = (np.arange(rows) % 35 > 0).astype(np.uint8)
    params = parameters(rows, mirostat_tau=2.5, mirostat_eta=0.3, mirostat_mu=5, chain=chain)
    together = in_core(logits, params, 3)
    mu = np.float32(5)
    for row in range(rows):
        mu = mu if chain[row] else np.float32(5)
        alone = in_core(
            logits[row : row + 1],
            parameters(1, mirostat_tau=2.5, mirostat_eta=0.3, mirostat_mu=mu, position=row),
        )
        assert alone.ids[0] == together.ids[row]
        mu = alone.mu[0]
        assert mu == together.mu[row]
    surprise = np.mean((together.mu[:-1] - together.mu[1:])[chain[1:] > 0] / 0.3 + 2.5)
    assert 1.5 < surprise < 3.5  # bits: the target is 2.5


def process(rows: list[int], logits: F32) -> None:
    for row, values in zip(rows, logits, strict=True):
        values += np.float32(row)
        values[row % 7 :: 3] = -np.inf


@pytest.mark.parametrize("isa", ISAS)
def test_processors_come_before_the_chain(isa: str) -> None:
    rows = 40
    logits = random_logits(rows, 700)
    params = parameters(rows, num_logprobs=2, top_k=20, typical_p=0.9)
    kept: list[F32] = []

    def work(wanted: list[int], given: F32) -> None:
        assert np.array_equal(given, logits[wanted])
        process(wanted, given)
        kept.append(given)  # it stays valid

    processing = Processing(np.arange(1, rows, 3, dtype=np.int32), work)
    out = no_samples(rows, params)
    _core.sample_alone(machine=machine(isa, 2), logits=logits, params=params, out=out, processing=processing)
    expected = sample(logits, params, Processing(processing.rows, process))
    plain = sample(logits, params)
    assert out.ids.tolist() == expected.ids.tolist()
    assert out.ids.tolist() != plain.ids.tolist()
    assert out.top_ids.tolist() == plain.top_ids.tolist()  # logprobs are the model's own
    assert sum(map(len, kept)) == len(processing.rows)
    again = logits[processing.rows]
    process(processing.rows.tolist(), again)
    assert np.array_equal(np.concatenate(kept), again)


def test_an_exception_in_a_processor_comes_through() -> None:
    def fail(rows: list[int], logits: F32) -> None:
        raise KeyError("here")

    params: SampleArrays = replace(parameters(2))
    processing = Processing(np.array([1], np.int32), fail)
    out = no_samples(2, params)
    with pytest.raises(KeyError, match="here"):
        _core.sample_alone(
            machine=machine("", 1), logits=random_logits(2, 50), params=params, out=out, processing=processing
        )
