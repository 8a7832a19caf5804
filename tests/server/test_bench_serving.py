"""The load of `pelton bench serve`, against a server whose every answer is known."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pelton.bench.serving import Load, Result, Target, drive, first_model
from pelton.cli.main import main
from pelton.errors import InvalidRequest, Overloaded
from tests.server.scripted import ScriptedService, serving

LOAD = Load(concurrency=2, num_requests=5, prompt_tokens=11, output_tokens=9)


def driven(service: ScriptedService, load: Load = LOAD) -> Result:
    async def run(url: str) -> Result:
        return await drive(await first_model(url), load)

    with serving(service) as url:
        return asyncio.run(run(url))


def test_counts_by_usage() -> None:
    service = ScriptedService(words=("one", "", "two"))  # an empty piece makes no chunk that shows, but is a token
    result = driven(service)
    assert (result.num_failed, result.first_error) == (0, "")
    assert result.tokens_per_second * result.seconds == pytest.approx(5 * 3)
    assert service.num_ended == 5


def test_what_each_request_asks_for() -> None:
    service = ScriptedService()
    driven(service)
    asked = service.requests
    assert [len(request.prompt_ids or ()) for request in asked] == [11] * 5
    assert len({request.prompt_ids for request in asked}) == 5
    for request in asked:
        assert (request.sampling.max_tokens, request.sampling.temperature) == (9, 0)
        assert request.sampling.ignore_eos


def test_no_more_at_once_than_asked() -> None:
    class Counting(ScriptedService):
        most = 0

        async def generate(self, request):  # type: ignore[no-untyped-def]
            events = await super().generate(request)
            Counting.most = max(Counting.most, self.num_open)
            return events

    driven(Counting(delay=0.02))
    assert Counting.most == 2


def test_times() -> None:
    result = driven(ScriptedService(delay=0.05))
    assert 0.05 <= result.ttft[0] <= result.ttft[1] <= result.ttft[2] <= result.end_to_end[2]
    assert result.ttft[0] <= result.end_to_end[0]
    assert result.itl[0] < 0.05  # the wait for the first token is no gap between tokens
    assert result.seconds >= 3 * 0.05  # five requests, two at once


@pytest.mark.parametrize(
    ("service", "message"),
    [
        (ScriptedService(refuse=Overloaded("the queue is full")), "429: "),
        (ScriptedService(fail_after=1), "the engine broke"),
        (ScriptedService(words=()), "no usage, or no tokens"),
    ],
    ids=["refused", "broken off", "nothing"],
)
def test_failures_are_counted_and_give_no_tokens(service: ScriptedService, message: str) -> None:
    result = driven(service)
    assert result.num_failed == 5
    assert message in result.first_error
    assert (result.tokens_per_second, result.ttft) == (0, (0, 0, 0))


def test_a_server_that_is_gone() -> None:
    with pytest.raises(InvalidRequest, match="does not answer as an OpenAI-compatible server"):
        asyncio.run(first_model("http://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.1.2.3", True),
        ("http://localhost:8000", True),
        ("http://[::1]:8000", True),
        ("http://192.168.0.7:8000", False),
        ("https://example.org", False),
    ],
)
def test_which_servers_are_on_this_machine(url: str, is_here: bool) -> None:
    assert Target(url, "m", None).is_here is is_here


def test_weights_are_read_once_per_step_for_all_streams() -> None:
    nothing = (0.0, 0.0, 0.0)
    result = Result(Load(4, 4, 1, 1), 0, "", 1.0, 100.0, nothing, nothing, nothing)
    assert result.weights_read(1000) == 25_000


def bench(*arguments: str) -> str:
    with serving(ScriptedService()) as url:
        command = ["bench", "serve", "--url", url, "--concurrency", "2", "--requests", "3", *arguments]
        answer = CliRunner().invoke(main, command, env={"COLUMNS": "160"})
    assert answer.exit_code == 0, answer.output
    return answer.stdout


@pytest.fixture
def read_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton.bench.limits.measure_read", lambda *args, **options: 7e9)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    async def first_model(url: str) -> Target:
        return Target(url, "scripted", None)

    monkeypatch.setattr("pelton.bench.serving.first_model", first_model)


@pytest.mark.usefixtures("read_limit")
def test_the_command_gives_the_share_of_the_limit() -> None:
    line = json.loads(bench("--json", "--weights", "77"))  # the server tells: 77 is not used
    assert (line["model"], line["weight_bytes"], line["read_limit"]) == ("scripted", 1000, 7e9)
    assert line["weights_read"] == pytest.approx(line["tokens_per_second"] / 2 * 1000)
    assert line["share"] == pytest.approx(line["weights_read"] / 7e9)


@pytest.mark.usefixtures("read_limit", "foreign")
def test_the_weights_of_a_server_that_does_not_tell(tmp_path: Path) -> None:
    line = json.loads(bench("--json"))
    assert (line["weight_bytes"], line["weights_read"], line["share"]) == (None, None, None)
    assert json.loads(bench("--json", "--weights", "2000"))["weight_bytes"] == 2000
    file = tmp_path / "m.gguf"
    file.write_bytes(bytes(300))
    assert json.loads(bench("--json", "--weights", str(file)))["weight_bytes"] == 300
    answer = CliRunner().invoke(main, ["bench", "serve", "--weights", "nothing.gguf"])
    assert answer.exit_code == 2
    assert "'nothing.gguf' is neither a number of bytes nor a file" in answer.output


@pytest.mark.usefixtures("read_limit", "foreign")
def test_the_table() -> None:
    lines = bench().splitlines()
    assert "limit: this machine reads 7.0 GB/s" in lines[-1]
    row = next(line for line in lines if "127.0.0.1" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")][3:5] == ["-", "-"]
