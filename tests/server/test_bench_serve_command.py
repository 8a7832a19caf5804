"""`pelton bench serve` as a command: tables, JSON, plots, options that make no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pelton.bench.serving.http import Address
from pelton.bench.serving.target import Target
from pelton.bench.serving.words import Counting
from pelton.cli.main import main
from tests.server.bench_servers import WordService
from tests.server.scripted import serving

SHORT = ["--concurrency", "2", "--requests", "3", "--warm-up", "0", "--prompt", "20"]
KEYS = {
    *("server", "url", "model", "endpoint", "weight_bytes", "counted_by", "round", "concurrency", "rate", "prompt"),
    *("output", "systems", "seed", "num_requests", "seconds", "tokens_per_second", "requests_per_second", "goodput"),
    *("good_share", "num_output_tokens", "num_prompt_tokens", "num_cached_tokens", "ttft", "tpot", "itl", "e2e"),
    *("max_in_flight", "client_share", "failures", "weights_read", "read_limit", "share"),
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "serve", *arguments], env={"COLUMNS": "180"})


def bench(*arguments: str, service: WordService | None = None) -> Result:
    with serving(service or WordService()) as url:
        answer = run("--url", f"one={url}", *SHORT, *arguments)
    assert answer.exit_code == 0, answer.output
    return answer


@pytest.fixture(autouse=True)
def read_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton.bench.limits.measure_read", lambda *args, **options: 7e9)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    async def find(name: str, address: Address, *options: Any) -> Target:
        return Target(name, address, "scripted", None, "completions", Counting(3, 1), True)

    monkeypatch.setattr("pelton.cli.load.find", find)


def test_json_lines() -> None:
    lines = [json.loads(line) for line in bench("--json", "--repeat", "2").stdout.splitlines()]
    assert [set(line) for line in lines] == [KEYS] * 2
    line = lines[0]
    assert (line["server"], line["model"], line["endpoint"], line["round"]) == ("one", "scripted", "completions", 0)
    assert (line["concurrency"], line["rate"], line["num_requests"], line["failures"]) == (2, None, 3, {})
    assert (line["num_prompt_tokens"], line["num_output_tokens"], line["num_cached_tokens"]) == (60, 9, 6)
    assert set(line["ttft"]) == {"median", "p95", "p99"}
    assert (line["weight_bytes"], line["read_limit"]) == (1000, 7e9)
    assert line["weights_read"] == pytest.approx(line["tokens_per_second"] / 2 * 1000)
    assert line["share"] == pytest.approx(line["weights_read"] / 7e9)


def test_json_file(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    with serving(WordService()) as other:
        bench("--json-file", str(file), "--url", f"two={other}", "--slo", "ttft=60000")
    found = json.loads(file.read_text())
    assert [line["server"] for line in found["results"]] == ["one", "two"]
    assert [line["good_share"] for line in found["results"]] == [1, 1]
    (ratio,) = found["ratios"]
    assert (ratio["level"], ratio["ours"], ratio["theirs"]) == ("2", "one", "two")
    assert set(ratio["factors"]) == {"tokens_per_second", "ttft", "tpot", "itl", "e2e"}


@pytest.mark.usefixtures("foreign")
def test_the_weights_of_a_server_that_does_not_tell(tmp_path: Path) -> None:
    line = json.loads(bench("--json").stdout)
    assert (line["weight_bytes"], line["weights_read"], line["share"]) == (None, None, None)
    assert json.loads(bench("--json", "--weights", "2000").stdout)["weight_bytes"] == 2000
    file = tmp_path / "m.gguf"
    file.write_bytes(bytes(300))
    assert json.loads(bench("--json", "--weights", str(file)).stdout)["weight_bytes"] == 300
    answer = run("--weights", "nothing.gguf")
    assert answer.exit_code == 2
    assert "'nothing.gguf' is neither a number of bytes nor a file" in answer.output


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]


def test_tables_and_bars() -> None:
    with serving(WordService()) as other:
        lines = bench("--url", f"two={other}", "--slo", "ttft=60000,itl=60000").stdout.splitlines()
    assert any("limit: this machine reads 7.0 GB/s" in line for line in lines)
    head = next(cells(line) for line in lines if "TTFT" in line)
    measured = ["tokens/s", "TTFT", "TPOT", "ITL", "E2E", "good/s (share)", "failed", "weights GB/s (share)"]
    assert head == ["load", "server", *measured, "client CPU"]
    row = next(cells(line) for line in lines if "│ one" in line)
    assert row[:2] == ["2", "one"]
    assert row[7].endswith("(100%)")
    assert row[8] == "0"
    ratio = next(cells(line) for line in lines if "│ two" in line and line.count("x ") >= 5)
    assert ratio[:3] == ["2", "one", "two"]
    assert sum(line.startswith("      2  ") for line in lines) == 4  # two servers in two panels


def test_shared_and_own_system_prompts_are_compared() -> None:
    lines = bench("--system", "2x30").stdout.splitlines()
    assert any("30 + 20 tokens in" in line for line in lines)
    assert [cells(line)[2] for line in lines if line.startswith("│    2 │ one ")] == ["shared", "own"]
    assert any("one, shared" in line and "one, not shared" in line for line in lines)


def test_rates() -> None:
    with serving(WordService()) as url:
        answer = run("--url", url, "--rate", "50", "--requests", "4", "--prompt", "8-30", "--json")
    line = json.loads(answer.stdout)
    assert (line["rate"], line["concurrency"], line["num_requests"]) == (50, None, 4)
    assert (line["prompt"], line["output"]) == ({"low": 8, "high": 30}, {"low": 128, "high": 128})


def test_failures_are_named() -> None:
    answer = bench(service=WordService(trouble={"fail_after": 1}))
    assert "one, 2: 3 requests failed with: the engine broke" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "2", "--concurrency", "3"], "give one of them"),
        (["--prompt", "many"], "'many' is neither a number of tokens"),
        (["--slo", "speed=3"], "'speed=3' is no bound"),
        (["--system", "4"], "'4' is not a number of system prompts"),
        (["--url", "nowhere"], "'nowhere' is not the address of a server"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], message: str) -> None:
    answer = run(*arguments)
    assert answer.exit_code != 0
    assert message in answer.output


@pytest.mark.usefixtures("foreign")
def test_two_servers_of_one_name() -> None:
    answer = run("--url", "a=http://127.0.0.1:1", "--url", "a=http://127.0.0.1:2")
    assert "two servers are named a" in answer.output


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pelton.bench.serving.plot.find_spec", lambda name: None)
    answer = run("--plot", str(tmp_path / "p.png"))
    assert answer.exit_code == 1
    assert "pip install matplotlib" in answer.output


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "p.png"
    bench("--plot", str(file), "--concurrency", "1")
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "writes a .png" in run("--plot", str(tmp_path / "p.pdf")).output
