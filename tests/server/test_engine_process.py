"""The engine in a process of its own: events, aborts, death, restart, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from pelton import errors
from pelton.backends import base
from pelton.backends.base import Backend, BackendConfig
from pelton.config import EngineConfig
from pelton.engine import machine, prepare, process
from pelton.engine.client import EngineClient, error_of
from pelton.engine.engine import Engine
from pelton.engine.link import Opening
from pelton.engine.protocol import LENGTH_BYTES, Abort, Alive, Counters, Events, FromEngine, Needs, Stop, framed
from pelton.formats.quants import WeightType
from pelton.request import Accepted, Done, EngineRequest, ErrorEvent, Event, Finish, SamplingParams, TokenEvent
from tests.models import convert, tiny

CONFIG = EngineConfig(kv_memory=8 << 20, max_batch_tokens=64, max_sequences=4, max_queue=2, threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    convert.write(tiny.build("llama", max_position_embeddings=4096), path, lambda name, shape: WeightType.Q8_0)
    return path


def ask(id: str, length: int = 10, max_tokens: int = 5, **sampling: object) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, **sampling)  # type: ignore[arg-type]
    return EngineRequest(id=id, prompt_ids=[i % 100 for i in range(length)], sampling=params)


async def collect(client: EngineClient, request: EngineRequest) -> list[Event]:
    events = [event async for event in client.submit(request)]
    assert sum(isinstance(event, Done | ErrorEvent) for event in events) == 1
    assert isinstance(events[0], Accepted | ErrorEvent)
    assert isinstance(events[-1], Done | ErrorEvent)
    return events


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def served(
    model: Path,
    body: Callable[[EngineClient], Awaitable[None]],
    *,
    in_process: bool = False,
    config: EngineConfig = CONFIG,
) -> None:
    """Run a test's body with a started client, and see that no process is left."""

    async def main() -> None:
        client = EngineClient(model, config, in_process=in_process)
        await client.start()
        pid = client.pid
        try:
            await asyncio.wait_for(body(client), 120)
        finally:
            await client.close()
        assert client.pid is None
        assert pid is None or not Path(f"/proc/{pid}").exists()

    asyncio.run(main())


@pytest.mark.parametrize("in_process", [False, True])
def test_requests_are_answered_and_progress_is_told(model: Path, in_process: bool):
    async def main() -> None:
        shares: list[float] = []
        asked: list[Needs] = []
        taken: list[int] = []

        async def admit(needs: Needs) -> int:
            asked.append(needs)
            return needs.usual + (8 << 20)

        client = EngineClient(model, CONFIG, in_process=in_process)
        with pytest.raises(errors.Unavailable):
            _ = client.info
        await client.start(Opening(admit, lambda memory, pid: taken.append(memory), shares.append))
        assert asked[0].least <= asked[0].usual
        planned = client.info.weight_bytes + client.info.kv_bytes + client.info.arena_bytes
        assert planned < taken[0] <= asked[0].usual + (8 << 20)
        assert shares == sorted(shares)
        assert shares[-1] == 1
        assert client.info.vocab_size == tiny.VOCAB
        assert client.info.context == 4096
        answers = await asyncio.gather(*(collect(client, ask(str(i), 10 + i, n=2)) for i in range(3)))
        for events in answers:
            assert sum(isinstance(event, TokenEvent) for event in events) == 10
            assert sum(isinstance(event, Finish) for event in events) == 2
        assert client.counters.completion_tokens == 30
        vector, finish, done = (await collect(client, msgspec.structs.replace(ask("v", 9, 0), pooling="mean")))[1:]
        assert len(vector.vector) == 4 * client.info.width == 4 * 96
        assert (finish, done.usage.prompt_tokens) == (Finish("v", 0, "stop"), 9)
        await client.close()
        await client.close()
        (event,) = await collect(client, ask("late"))
        assert isinstance(error_of(event), errors.Unavailable)

    asyncio.run(main())


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "msgspec.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)

    async def body(client: EngineClient) -> None:
        assert isinstance((await collect(client, ask("a")))[-1], Done)

    served(model, body)


def test_both_ways_give_the_same(model: Path):
    async def body(client: EngineClient) -> None:
        *events, done = await collect(client, ask("a", 100, 30))
        assert isinstance(done, Done)
        told.append([*events, Done(done.request_id, done.usage)])  # how long it waited is another matter

    told: list[list[Event]] = []
    served(model, body)
    served(model, body, in_process=True)
    assert told[0] == told[1]


@pytest.mark.parametrize("in_process", [False, True])
def test_abort_and_leaving_free_the_place_in_every_state(model: Path, in_process: bool):
    async def body(client: EngineClient) -> None:
        for state in ("decoding", "prefill", "queued"):
            for leaves in (False, True):
                others = [
                    asyncio.create_task(collect(client, ask(f"{state} {leaves} {i}", 10, 3000)))
                    for i in range(4 if state == "queued" else 0)
                ]
                if others:
                    await until(lambda: client.counters.num_running == 4)
                id = f"{state} {leaves}"
                stream = client.submit(ask(id, 2000 if state == "prefill" else 10, 2000))
                assert isinstance(await anext(stream), Accepted)
                if state == "decoding":
                    assert isinstance(await anext(stream), TokenEvent)
                before = client.counters.aborted
                if leaves:
                    await stream.aclose()  # type: ignore[attr-defined]
                else:
                    client.abort(id)
                    rest = [event async for event in stream]
                    assert Finish(id, 0, "abort") in rest
                    assert isinstance(rest[-1], Done)
                await until(lambda before=before: client.counters.aborted == before + 1)
                for i in range(len(others)):
                    client.abort(f"{state} {leaves} {i}")
                await asyncio.gather(*others)
                await until(lambda: client.counters.kv_blocks_used == 0 and client.counters.num_waiting == 0)

    served(model, body, in_process=in_process)


def test_one_choice_can_be_ended(model: Path):
    async def body(client: EngineClient) -> None:
        reasons = {}
        async for event in client.submit(ask("a", 10, 3500, n=2)):
            if isinstance(event, TokenEvent) and event.choice == 1:
                client.abort("a", 1)
            if isinstance(event, Finish):
                reasons[event.choice] = event.reason
        assert reasons == {0: "length", 1: "abort"}

    served(model, body)


def test_errors_come_by_their_names(model: Path):
    async def body(client: EngineClient) -> None:
        (event,) = await collect(client, ask("a", 5000))
        assert isinstance(error_of(event), errors.ContextLengthExceeded)
        assert "5000" in event.message
        assert "4096" in event.message
        running = [asyncio.create_task(collect(client, ask(str(i), 10, 3500))) for i in range(4)]
        await until(lambda: client.counters.num_running == 4)
        waiting = [asyncio.create_task(collect(client, ask(f"w{i}"))) for i in range(2)]
        await until(lambda: client.counters.num_waiting == 2)
        (event,) = await collect(client, ask("too many"))
        assert isinstance(error_of(event), errors.Overloaded)
        (event,) = await collect(client, ask("0"))
        assert isinstance(error_of(event), errors.InvalidRequest)
        for i in range(4):
            client.abort(str(i))
        await asyncio.gather(*running, *waiting)

    served(model, body)


def test_killed_in_the_middle_of_streams_and_started_again(model: Path):
    async def body(client: EngineClient) -> None:
        first = client.pid
        streams = [asyncio.create_task(collect(client, ask(str(i), 10, 3000))) for i in range(6)]
        await until(lambda: client.counters.num_running == 4 and client.counters.num_waiting == 2)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        killed = time.monotonic()
        for events in await asyncio.gather(*streams):
            assert isinstance(events[-1], ErrorEvent)
            assert isinstance(error_of(events[-1]), errors.EngineDied)
            assert "SIGKILL" in events[-1].message
        assert time.monotonic() - killed < 1
        after = await asyncio.gather(
            collect(client, ask("after")), collect(client, ask("after"))
        )  # wait for the new one
        assert isinstance(after[0][-1], Done)
        assert [event.kind for event in after[1] if isinstance(event, ErrorEvent)] == ["InvalidRequest"]
        assert client.pid not in (None, first)
        assert not Path(f"/proc/{first}").exists()  # no zombie

    served(model, body)


def test_what_a_service_manager_sends_to_all_processes_ends_no_answer(model: Path):
    async def body(client: EngineClient) -> None:
        stream = asyncio.create_task(collect(client, ask("a", 10, 500)))
        await until(lambda: client.counters.num_running == 1)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGTERM)
        assert isinstance((await stream)[-1], Done)

    served(model, body)


@pytest.mark.parametrize("is_idle", [False, True])
def test_one_that_stands_still_counts_as_dead(model: Path, is_idle: bool):
    async def body(client: EngineClient) -> None:
        first = client.pid
        assert first is not None
        streams = [asyncio.create_task(collect(client, ask(str(i), 10, 3000))) for i in range(0 if is_idle else 6)]
        await until(lambda: client.counters.num_running == (0 if is_idle else 4))
        os.kill(first, signal.SIGSTOP)
        for events in await asyncio.gather(*streams):
            assert isinstance(events[-1], ErrorEvent)
            assert isinstance(error_of(events[-1]), errors.EngineDied)
            assert "no sign of life for 2 s" in events[-1].message
        await until(lambda: client.pid not in (None, first))
        assert isinstance((await collect(client, ask("after")))[-1], Done)
        assert not Path(f"/proc/{first}").exists()

    served(model, body, config=msgspec.structs.replace(CONFIG, heartbeat_timeout=2.0))


def read(client: socket.socket) -> FromEngine:
    with client.makefile("rb", buffering=0) as stream:
        body = stream.read(int.from_bytes(stream.read(LENGTH_BYTES), "little"))
    return msgspec.msgpack.decode(body, type=FromEngine)


def test_signs_of_life_come_in_the_middle_of_a_long_step():
    client, engine = socket.socketpair()
    peer = process.Peer(engine.detach())
    with client:
        time.sleep(2.5)  # a step
        peer.send(Events([], Counters()))
        messages = [read(client) for _ in range(3)]
        peer.close()
    assert [type(message) for message in messages] == [Alive, Alive, Events]


def test_a_client_that_reads_slowly_gets_everything_and_blocks_nobody():
    client, engine = socket.socketpair()
    peer = process.Peer(engine.detach())
    count = 5000  # far more than a socket's buffer holds
    with client:
        for step in range(count):
            peer.send(Events([TokenEvent("a" * 100, 0, step)], Counters()))
        client.sendall(framed(msgspec.msgpack.encode(Abort("b")))[:-1])
        told: list[int] = []
        client.setblocking(False)
        received = bytearray()
        while len(told) < count:
            assert peer.receive(0) is None  # that message has not come in full
            with suppress(BlockingIOError):
                received += client.recv(1 << 20)
            while len(received) > LENGTH_BYTES:
                end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "little")
                if len(received) < end:
                    break
                message = msgspec.msgpack.decode(received[LENGTH_BYTES:end], type=FromEngine)
                del received[:end]
                if isinstance(message, Events):
                    told += [event.token_id for event in message.events if isinstance(event, TokenEvent)]
        assert told == list(range(count))
        client.setblocking(True)
        client.sendall(framed(msgspec.msgpack.encode(Abort("b")))[-1:])
        assert peer.receive(1000) == Abort("b")
        client.shutdown(socket.SHUT_WR)
        assert isinstance(peer.receive(1000), Stop)
        peer.close()


def test_an_idle_engine_that_dies_comes_back_by_itself(model: Path):
    async def body(client: EngineClient) -> None:
        first = client.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: client.pid not in (None, first))
        assert isinstance((await collect(client, ask("a")))[-1], Done)

    served(model, body)


def test_an_engine_whose_file_was_changed_says_so_at_once(tmp_path: Path, model: Path):
    path = tmp_path / "changed.gguf"
    path.write_bytes(model.read_bytes())

    async def body(client: EngineClient) -> None:
        path.write_bytes(b"GGUF")
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.pid is None and client.trouble is not None)
        for id in ("a", "b"):
            (failed,) = await asyncio.wait_for(collect(client, ask(id)), 5)
            assert isinstance(failed, ErrorEvent)
            assert failed.kind == "Unavailable"
            assert "in vain so far: " in failed.message
            assert "changed.gguf" in failed.message

    served(path, body)


def test_an_engine_in_this_thread_that_cannot_go_on_is_started_again(model: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(engine: Engine) -> list[Event]:
        monkeypatch.undo()
        raise errors.InternalError("block pool: a block is lost")

    async def body(client: EngineClient) -> None:
        streams = [asyncio.create_task(collect(client, ask(str(i), 10, 3000))) for i in range(2)]
        await until(lambda: client.counters.num_running == 2)
        monkeypatch.setattr(Engine, "advance", broken)
        for events in await asyncio.gather(*streams):
            assert isinstance(events[-1], ErrorEvent)
            assert isinstance(error_of(events[-1]), errors.EngineDied)
            assert "a block is lost" in events[-1].message
        assert isinstance((await collect(client, ask("after")))[-1], Done)

    served(model, body, in_process=True)


def test_what_cannot_be_loaded_is_said_and_leaves_nothing(tmp_path: Path, model: Path):
    async def fails(path: Path, config: EngineConfig, kind: type[errors.PeltonError], words: str) -> None:
        client = EngineClient(path, config)
        with pytest.raises(kind, match=words):
            await client.start()
        await client.close()

    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 20)
    asyncio.run(fails(broken, CONFIG, errors.FormatError, "broken.gguf"))
    asyncio.run(fails(tmp_path / "absent.gguf", CONFIG, errors.ModelNotFound, "absent.gguf"))
    asyncio.run(fails(model, EngineConfig(kv_memory=1000), errors.InsufficientMemory, "context"))
    asyncio.run(fails(model, EngineConfig(isa="nonsense"), errors.ConfigError, "nonsense"))
    asyncio.run(fails(model, EngineConfig(threads=-1), errors.ConfigError, "threads is -1"))
    asyncio.run(fails(model, EngineConfig(target_itl=-5.0), errors.ConfigError, "target_itl is -5"))
    asyncio.run(fails(model, EngineConfig(heartbeat_timeout=0.5), errors.ConfigError, "heartbeat_timeout is 0.5"))


@pytest.mark.parametrize(("threads", "expected"), [(0, 3), (2, 2)])
def test_by_default_every_core_works(model: Path, monkeypatch: pytest.MonkeyPatch, threads: int, expected: int):
    def find(name: str, config: BackendConfig) -> Backend:
        asked.append(config.num_threads)
        return base.find(name, config)

    asked: list[int] = []
    monkeypatch.setattr(prepare, "find", find)
    monkeypatch.setattr(machine, "num_cores", lambda: 3)
    served(model, lambda client: asyncio.sleep(0), in_process=True, config=EngineConfig(threads=threads))
    assert asked == [expected]


CHILD = """
import asyncio, sys
from pathlib import Path
from pelton.config import EngineConfig
from pelton.engine.client import EngineClient
from pelton.request import EngineRequest, SamplingParams

async def main():
    client = EngineClient(Path(sys.argv[1]), EngineConfig(kv_memory=8 << 20, threads=1))
    await client.start()
    print(client.pid, flush=True)
    request = EngineRequest(id="a", prompt_ids=[1], sampling=SamplingParams(max_tokens=4000, seed=0))
    async for event in client.submit(request):
        pass

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_process_ends_with_its_parent_in_the_middle_of_a_stream(model: Path, how: signal.Signals):
    with tempfile.TemporaryDirectory() as folder:
        _end_parent(model, how, {**os.environ, "TMPDIR": folder})
        assert os.listdir(folder) == []  # noqa: PTH208


def _end_parent(model: Path, how: signal.Signals, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", CHILD, str(model)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    engine = int(parent.stdout.readline())
    parent.send_signal(how)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while _is_alive(engine):
        assert time.monotonic() < deadline, "the engine outlived its parent"
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.mark.parametrize("in_process", [False, True])
def test_a_profile_is_printed_once_as_the_engine_ends(model: Path, in_process: bool, capfd: pytest.CaptureFixture[str]):
    async def body(client: EngineClient) -> None:
        await collect(client, ask("a", max_tokens=5))
        assert "linear" not in capfd.readouterr().err

    served(model, body, in_process=in_process, config=msgspec.structs.replace(CONFIG, profile=True))
    told = capfd.readouterr().err
    assert told.count("decode: 4 steps") == told.count("prompt: 1 steps") == 1
    assert told.count("linear layers.*.gate|up Q8_0") == 2
    assert told.count("outside the core") == 2


@pytest.mark.parametrize("in_process", [False, True])
def test_what_ends_by_time_alone_does_so_while_nothing_runs(model: Path, in_process: bool):
    async def body(client: EngineClient) -> None:
        pin = msgspec.structs.replace(ask("pin", 64, 0), pin_ttl=0.3)
        assert isinstance((await collect(client, pin))[-1], Done)
        assert [each.id for each in client.counters.pins] == ["pin"]
        await until(lambda: not client.counters.pins, 5)

    served(model, body, in_process=in_process)


def test_an_idle_process_sleeps(model: Path):
    async def body(client: EngineClient) -> None:
        await collect(client, ask("a"))
        stat = Path(f"/proc/{client.pid}/stat")
        before = sum(map(int, stat.read_text().rsplit(")", 1)[1].split()[11:13]))
        await asyncio.sleep(2)
        assert sum(map(int, stat.read_text().rsplit(")", 1)[1].split()[11:13])) - before <= 10  # 0.1 s of 2

    served(model, body, config=msgspec.structs.replace(CONFIG, threads=2))


def test_private_memory_stays_within_the_plan(smollm2: Path):
    async def body(client: EngineClient) -> None:
        for i in range(4):  # 4 prompts of 500 tokens: KV memory is full, the cache evicts
            prompt = [(7 * i + j) % 1000 for j in range(500)]
            params = SamplingParams(max_tokens=2, temperature=0.0, seed=0)
            await collect(client, EngineRequest(id=str(i), prompt_ids=prompt, sampling=params))
        info = client.info
        status = Path(f"/proc/{client.pid}/status").read_text()
        private = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))
        plan = info.weight_bytes + info.arena_bytes + info.kv_bytes
        assert plan * 0.8 < private <= plan + (64 << 20)

    served(smollm2, body, config=EngineConfig(kv_memory=32 << 20, context=1024, threads=2))
