"""What an engine process leaves for its next start: the files' digest, and the packed weights."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pelton.config import EngineConfig
from pelton.engine.client import EngineClient
from pelton.formats.bounded_folder import BoundedFolder
from pelton.formats.digest import FileDigest
from pelton.formats.quants import WeightType
from pelton.request import EngineRequest, SamplingParams, TokenEvent
from tests.models import convert, tiny
from tests.server.test_engine_process import CONFIG, ask, collect, until

LONG_AGO = (10**9, 10**9)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    convert.write(tiny.build("llama"), path, lambda name, shape: WeightType.Q8_0)
    os.utime(path, LONG_AGO)
    return path


class Starts:
    """Starts of one model, which share a folder and what is remembered."""

    def __init__(self, model: Path, folder: Path, config: EngineConfig = CONFIG) -> None:
        self.model, self.folder, self.config = model, folder, config
        self.remembered: list[tuple[FileDigest, ...]] = []

    def client(self, *, in_process: bool = False) -> EngineClient:
        return EngineClient(
            self.model,
            self.config,
            in_process=in_process,
            known=self.remembered[-1] if self.remembered else (),
            packed=BoundedFolder(str(self.folder), 10**9),
            remember=self.remember,
        )

    def remember(self, files: tuple[FileDigest, ...]) -> None:
        assert threading.current_thread() is not threading.main_thread(), "writing keeps the event loop waiting"
        self.remembered.append(files)

    @property
    def kept(self) -> list[Path]:
        return list(self.folder.glob("*.packed"))


async def answer(client: EngineClient) -> list[TokenEvent]:
    events = await collect(client, ask("a", logprobs=2))
    return [event for event in events if isinstance(event, TokenEvent)]


@pytest.mark.parametrize("in_process", [False, True])
def test_the_second_start_reads_what_the_first_one_kept(model: Path, tmp_path: Path, in_process: bool):
    starts = Starts(model, tmp_path / "packed")

    async def first() -> tuple[object, str | None]:
        client = starts.client(in_process=in_process)
        await client.start()
        assert client.info.fingerprint is None
        tokens = await answer(client)
        assert tokens
        await until(lambda: starts.kept)
        await until(lambda: client.info.fingerprint)
        fingerprint = client.info.fingerprint
        await client.close()
        return tokens, fingerprint

    async def second() -> tuple[object, str | None]:
        client = starts.client(in_process=in_process)
        await client.start()
        fingerprint = client.info.fingerprint  # known at once
        tokens = await answer(client)
        await client.close()
        return tokens, fingerprint

    fresh = asyncio.run(first())
    (kept,) = starts.kept
    os.utime(kept, LONG_AGO)
    assert asyncio.run(second()) == fresh
    assert kept.stat().st_mtime > LONG_AGO[0], "it was used"
    assert len(starts.remembered) == 1
    kept.write_bytes(kept.read_bytes()[:-100] + bytes(100))
    assert asyncio.run(second()) == fresh
    assert not kept.exists(), "it was damaged, and is not used"


def test_an_engine_is_not_started_again_with_another_file(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async def body() -> None:
        client = Starts(model, tmp_path / "packed").client()
        await client.start()
        pid = client.pid
        assert pid is not None
        os.utime(model, (10**9 + 1, 10**9 + 1))
        os.kill(pid, signal.SIGKILL)
        await until(lambda: "was changed since it was first loaded" in caplog.text)
        os.utime(model, LONG_AGO)
        await until(lambda: client.pid not in (None, pid))
        assert await answer(client)
        await client.close()

    asyncio.run(body())


@contextmanager
def peak_of_engines() -> Iterator[list[int]]:
    """The most private memory that an engine process of ours had at once, seen every few milliseconds."""
    peak, is_over = [0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.003):
            for task in Path("/proc/self/task").iterdir():
                with suppress(OSError):
                    for pid in (task / "children").read_text().split():
                        if "pelton.engine.process" not in Path(f"/proc/{pid}/cmdline").read_text():
                            continue  # between fork and exec: it still has this process's memory
                        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                        anon = [line for line in lines if line.startswith("RssAnon:")]
                        peak[0] = max([peak[0], *(int(line.split()[1]) << 10 for line in anon)])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def huge_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))


def test_private_memory_is_never_more_than_planned(smollm2: Path, tmp_path: Path):
    """From the start on: while weights are packed, their files are hashed and they are written, and while they are
    read. And they lie on huge pages either way, where the system has them for those who ask."""
    starts = Starts(smollm2, tmp_path / "packed", EngineConfig(kv_memory=32 << 20, context=1024, threads=2))
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    has_huge = thp.exists() and "[never]" not in thp.read_text()

    async def start() -> list[TokenEvent]:
        client = starts.client()
        await client.start()
        assert client.pid is not None
        params = SamplingParams(max_tokens=8, temperature=0.0, seed=0, logprobs=1)
        request = EngineRequest(id="a", prompt_ids=[i % 1000 for i in range(500)], sampling=params)
        tokens = [event for event in await collect(client, request) if isinstance(event, TokenEvent)]
        await until(lambda: starts.kept, 100)
        plan = client.info.weight_bytes + client.info.arena_bytes + client.info.kv_bytes
        assert plan * 0.8 < peak[0] <= plan + (64 << 20)
        if has_huge:
            assert huge_bytes(client.pid) > 0.9 * client.info.weight_bytes
        await client.close()
        return tokens

    with peak_of_engines() as peak:
        fresh = asyncio.run(start())
        began = time.time()
        peak[0] = 0
        assert asyncio.run(start()) == fresh
    assert starts.kept[0].stat().st_mtime >= began - 1, "the second start read it"
