"""The kernels' benchmark: that its numbers hang together, not how large they are."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pelton.bench import kernels
from pelton.formats.quants import WeightType


def test_measures_every_type_and_number_of_rows_against_limits() -> None:
    options = kernels.Options(
        isa="generic",
        num_threads=2,
        types=(WeightType.Q4_0, WeightType.BF16),
        num_rows=(1, 8),
        columns=256,
        weight_bytes=1 << 20,
        seconds=0.01,
    )
    limits, results = kernels.run(options)
    assert limits.read > 0
    assert limits.int8 > 0
    assert limits.float32 > 0
    assert [(r.type.name, r.family, r.num_rows) for r in results] == [
        ("Q4_0", "int8", 1),
        ("Q4_0", "int8", 8),
        ("BF16", "float32", 1),
        ("BF16", "float32", 8),
    ]
    for r in results:
        bytes_per_weight = {"Q4_0": 18 / 32, "BF16": 2}[r.type.name]
        assert r.operations_per_second == pytest.approx(2 * r.num_rows * r.bytes_per_second / bytes_per_weight)
        assert r.limit in {"memory", "arithmetic"}
        assert 0 < r.share <= r.best_share
    text = io.StringIO()
    kernels.print_table(options, limits, results, Console(file=text, width=120))
    assert "generic, 2 thread(s), K = 256" in text.getvalue()
    assert "Q4_0" in text.getvalue()


def test_a_type_without_kernel_gives_no_line() -> None:
    options = kernels.Options(isa="generic", types=(WeightType.IQ4_NL,), weight_bytes=1 << 16, seconds=0.001)
    assert kernels.run(options)[1] == []
