"""`pelton bench serve` as a command: tables, JSON, plots, options that make no sense."""

from __future__ import annotations

import json
import re
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
    return CliRunner().invoke(main, ["bench", "serve", *arguments], env={"COLUMNS": "40"})


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
    async def find(name: str, address: Address, *options: Any, **more: Any) -> Target:
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


def table(output: str, title: str) -> list[list[str]]:
    """Its head and its rows, as cells."""
    lines = iter(output.splitlines())
    next(line for line in lines if line.strip() == title)
    found = []
    for line in lines:
        if line.strip().startswith("─") or (not line.strip() and not found):
            continue
        if not line.strip():
            return found
        found.append(re.split(r"  +", line.strip()))
    return found


def test_tables_and_bars() -> None:
    with serving(WordService()) as other:
        output = bench("--url", f"two={other}", "--slo", "ttft=60000,itl=60000").stdout
    assert "limit: this machine reads 7.0 GB/s" in output
    head, *rows = table(output, "20 tokens in, 128 out")
    assert head == ["load", "server", "tokens/s", "good/s (share)", "failed", "weights GB/s (share)", "client CPU"]
    assert [row[:2] for row in rows] == [["2", "one"], ["2", "two"]]
    assert all(row[3].endswith("(100%)") and row[4] == "0" and row[6].endswith("%") for row in rows)
    head, *rows = table(output, "ms: median/p95/p99")
    assert head == ["load", "server", "TTFT", "TPOT", "ITL", "E2E"]
    assert all(re.fullmatch(r"\d+/\d+/\d+", cell) for row in rows for cell in row[2:])
    head, row = table(output, "how many times as fast: medians of the rounds' ratios")
    assert row[:3] == ["2", "one", "two"]
    assert all(re.fullmatch(r"\d+\.\d\dx", cell) for cell in row[3:])
    assert sum(line.startswith("      2  ") for line in output.splitlines()) == 4  # two servers in two panels
    assert max(map(len, output.splitlines())) <= 100


def test_shared_and_own_system_prompts_are_compared() -> None:
    output = bench("--system", "2x30").stdout
    assert [row[1] for row in table(output, "30 + 20 tokens in, 128 out")] == ["server", "one, shared", "one, own"]
    assert table(output, "how many times as fast: medians of the rounds' ratios")[1][1:3] == ["one, shared", "one, own"]


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
