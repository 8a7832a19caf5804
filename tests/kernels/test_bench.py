"""The kernels' benchmark: that its numbers hang together, not how large they are."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

from pelton import _core
from pelton.backends.base import OpTime
from pelton.bench import kernels, steps
from pelton.bench.attention import Attention, Heads
from pelton.bench.limits import Limits, Times
from pelton.bench.linear import Products
from pelton.bench.result import judge
from pelton.bench.sampling import DEFAULT_DRAWS, Sampling
from pelton.cli.main import main
from pelton.formats.quants import WeightType

SMALL = kernels.Options(
    isa="generic",
    num_threads=2,
    linear=Products(types=(), num_rows=(1, 8), columns=256),
    attention=Attention(heads=()),
    sampling=Sampling(vocab_sizes=()),
    num_bytes=1 << 20,
    seconds=0.005,
)


def test_every_type_and_number_of_rows() -> None:
    linear = replace(SMALL.linear, types=(WeightType.Q4_0, WeightType.BF16))
    limits, results = kernels.run(replace(SMALL, linear=linear))
    assert limits.read > 0
    assert limits.int8 > 0
    assert limits.float32 > 0
    assert [(r.op, r.subject, r.num_rows) for r in results] == [
        ("linear", "Q4_0, int8", 1),
        ("linear", "Q4_0, int8", 8),
        ("linear", "BF16, float32", 1),
        ("linear", "BF16, float32", 8),
    ]
    for r in results:
        bytes_per_weight = 18 / 32 if "Q4_0" in r.subject else 2
        assert r.operations_per_second == pytest.approx(2 * r.num_rows * r.bytes_per_second / bytes_per_weight)
        assert r.limit in {"memory", "arithmetic"}
        assert 0 < r.share <= r.best_share


class Tiled:
    """A kernel as a CPU with tile registers has it, but for its speed."""

    family = 2

    def __init__(self, isa: str, type: WeightType) -> None:
        self.kernel = _core.LinearKernel(isa, type)

    def __getattr__(self, name: str) -> object:
        return getattr(self.kernel, name)


class TileLimits:
    """The limits of such a CPU: a tile product a microsecond."""

    has_tiles = True

    def __init__(self, isa: str) -> None:
        self.core = _core.Limits(isa)

    def bf16_products(self, num_steps: int) -> float:
        time.sleep(1e-6 * num_steps)
        return 32.0 * num_steps

    def __getattr__(self, name: str) -> object:
        return getattr(self.core, name)


def test_products_of_tiles_are_held_against_what_tiles_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Tiled("generic", WeightType.Q4_0)
    monkeypatch.setattr("pelton.bench.limits._core", SimpleNamespace(Limits=TileLimits))
    monkeypatch.setattr("pelton.bench.linear._core", SimpleNamespace(LinearKernel=lambda isa, type: kernel))
    linear = replace(SMALL.linear, types=(WeightType.Q4_0,), num_rows=(512,))
    limits, [result] = kernels.run(replace(SMALL, linear=linear))
    assert limits.bf16 == pytest.approx(2 * 16 * 16 * 32 * 2 / 1e-6, rel=0.5)  # two threads
    assert (result.subject, result.limit) == ("Q4_0, bf16", "arithmetic")
    assert result.share == pytest.approx(result.operations_per_second / limits.bf16)
    op = OpTime("linear layers.*.o Q4_0", 1, 1.0, 1, 10**9, "bf16")
    times = steps._judged(op, limits)
    assert (times.limit, times.share) == ("arithmetic", pytest.approx(1e9 / limits.bf16))
    text = io.StringIO()
    kernels.print_table(SMALL, limits, [result], Console(file=text, width=40))
    assert f"bf16 {limits.bf16 / 1e9:.1f} GFLOP/s" in text.getvalue()


def test_where_there_are_no_tiles_none_are_timed() -> None:
    core = _core.Limits("generic")
    assert not core.has_tiles
    with pytest.raises(ValueError, match="no tiles"):
        core.bf16_products(4)
    assert kernels.run(SMALL)[0].bf16 is None


def test_a_type_without_kernel_gives_no_line() -> None:
    assert kernels.run(replace(SMALL, linear=replace(SMALL.linear, types=(WeightType.I8,))))[1] == []


def test_attention_after_contexts_and_over_a_prompt() -> None:
    attention = Attention(heads=(Heads("tiny", 6, 2, 32),), contexts=(1, 300), prompt=70, kv_type="f32")
    _, results = kernels.run(replace(SMALL, attention=attention))
    heads = "tiny 6/2x32 f32"
    assert [(r.subject, r.num_rows) for r in results] == [
        (f"{heads}, decode at 1", 1),
        (f"{heads}, decode at 300", 1),
        (f"{heads}, prompt of 70", 70),
    ]
    for r, keys_seen, keys in zip(results, (1, 300, 70 * 71 // 2), (1, 300, 70), strict=True):
        assert r.operations_per_second * r.seconds == pytest.approx(2 * keys_seen * 6 * (32 + 32))
        assert r.bytes_per_second * r.seconds == pytest.approx(keys * 2 * (32 + 32) * 4)
        assert 0 < r.share <= r.best_share


def test_sampling_of_every_kind() -> None:
    _, results = kernels.run(replace(SMALL, sampling=Sampling(vocab_sizes=(5000,))))
    assert [r.subject for r in results] == [f"5000 ids, {draw.name}" for draw in DEFAULT_DRAWS]
    for r in results:
        assert r.num_rows == (1 << 20) // 20_000
        assert r.bytes_per_second * r.seconds == pytest.approx(r.num_rows * 20_000)
        assert (r.operations_per_second, r.limit) == (0, "memory")


def test_the_limit_is_what_takes_longest() -> None:
    limits = Limits(read=100.0, int8=1.0, float32=1.0)

    def result(peak: float | None) -> tuple[str, float, float]:
        times = Times(median=8.0, best=5.0)
        r = judge("linear", "Q4_0", 1, times, num_bytes=200, operations=40, limits=limits, peak=peak)
        return r.limit, r.share, r.best_share

    assert result(peak=10.0) == ("arithmetic", 0.5, 0.8)
    assert result(peak=40.0) == ("memory", 0.25, 0.4)
    assert result(peak=None) == ("memory", 0.25, 0.4)


def test_the_table() -> None:
    times = Times(0.004, 0.002)
    limits = Limits(read=100e9, int8=900e9, float32=300e9)
    r = judge("sampling", "9 ids, greedy", 7, times, num_bytes=10**8, operations=0, limits=limits, peak=None)
    text = io.StringIO()
    kernels.print_table(SMALL, limits, [r], Console(file=text, width=40))
    assert "limits: read 100.0 GB/s, int8 900.0 GOP/s, float32 300.0 GFLOP/s" in text.getvalue()
    line = next(line for line in text.getvalue().splitlines() if "greedy" in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["sampling", "9 ids, greedy", "7", "4.000", "25.0", "-", "memory", "25 %", "50 %"]


def test_the_command() -> None:
    arguments = "bench kernels --op linear --isa generic --threads 1 --type q8_0 --rows 2 --seconds 0.001"
    answer = CliRunner().invoke(main, arguments.split())
    assert answer.exit_code == 0, answer.output
    lines = [line for line in answer.output.splitlines() if "linear" in line and "int8" in line]
    assert [line.strip("│").split("│")[1].strip() for line in lines if "Q8_0" in line] == ["Q8_0, int8"]
    assert "sampling" not in answer.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--type Q9_0", "no kernel multiplies 'Q9_0'"), ("--isa amx --type Q4_0", "isa: there is no 'amx' here")],
)
def test_what_is_not_here_is_refused(arguments: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton._core.isas", lambda: ["generic"])
    answer = CliRunner().invoke(main, ["bench", "kernels", *arguments.split()])
    assert answer.exit_code == 1
    assert message in answer.output


def test_the_threads_alone() -> None:
    _, results = kernels.run(replace(SMALL, threads=True))
    assert [(r.op, r.num_rows, r.limit) for r in results] == [("threads", 2, "-")]
    assert 0 < results[0].seconds < 0.01
