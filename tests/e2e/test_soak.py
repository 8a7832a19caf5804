"""A soak: thousands of requests of all kinds on little memory. Every block comes back, memory stays flat, and who was
answered was answered as in a quiet run, with `==`."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import httpx2 as httpx
import msgspec
import pytest

from pelton.config import EngineConfig
from pelton.engine.client import EngineClient
from pelton.engine.protocol import Vocabulary
from pelton.formats.bounded_folder import BoundedFolder
from pelton.formats.digest import FileDigest
from pelton.text.tokenizer import Tokenizer
from tests.e2e import tiny_model
from tests.e2e.pelton_process import private_bytes, serving
from tests.e2e.soak import Soak, bad_kinds, kinds, quiet_answers
from tests.e2e.soak_http import HTTPSoak, bodies
from tests.e2e.soak_http import quiet_answers as quiet_answers_of
from tests.e2e.tiny_model import END, METADATA

CONTEXT = 768
QUIET = EngineConfig(kv_memory=32 << 20, context=CONTEXT, threads=1, prefix_cache=False, speculation="off")
BUSY = EngineConfig(
    context=CONTEXT,
    threads=2,
    max_sequences=8,
    max_batch_tokens=96,
    max_queue=6,
    max_queue_tokens=2500,
    patience=3000,
    swap_memory=1 << 18,
)


@pytest.fixture(scope="module", params=list(tiny_model.CASES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models"), request.param)


NUM_TOKENS = 1400
"""What KV memory holds: not two contexts."""
SERVER_KV = 1 << 20
GROWTH = 8 << 20
"""Bytes that a process may have more at the end than after a quarter of all requests."""


async def soak(model: Path, vocabulary: Vocabulary, disk: BoundedFolder, num_requests: int) -> Soak:
    asked = kinds(1, len(vocabulary.tokens), END)
    quiet = EngineClient(model, QUIET)
    await quiet.start()
    quiet.teach(vocabulary)
    expected = await quiet_answers(quiet, asked)
    memory = quiet.info.kv_bytes * NUM_TOKENS // quiet.info.kv_tokens
    (file,) = quiet.info.files
    known = (FileDigest(file, hashlib.sha256(model.read_bytes()).hexdigest()),)
    await quiet.close()

    client = EngineClient(model, msgspec.structs.replace(BUSY, kv_memory=memory), known=known, prefixes=disk)
    await client.start()
    client.teach(vocabulary)
    pid = client.pid
    assert pid is not None
    run = Soak(client, asked, expected, bad_kinds(len(vocabulary.tokens), CONTEXT))
    try:
        await run.run(num_requests // 4, 24)
        before = private_bytes(pid)
        await run.run(num_requests - num_requests // 4, 24)
        await run.end()
        run.seen["growth"] = private_bytes(pid) - before
        assert client.pid == pid
    finally:
        await client.close()
    return run


OFTEN = {"ended", "aborted", "left", "bad", "came again"}
OFTEN_COUNTED = {"preempted", "swapped", "accepted", "cached_tokens"}
SOMETIMES = {"pinned", "TimedOut", "QueueTimeout"}
SOMETIMES_COUNTED = {"disk_bytes_written", "disk_bytes_read"}


def check(run: Soak, *, is_long: bool) -> None:
    """It was a soak: all that should happen to an engine did."""
    told = f"{dict(run.seen)} {run.client.counters}"
    seen = OFTEN | SOMETIMES if is_long else OFTEN
    counted = OFTEN_COUNTED | SOMETIMES_COUNTED if is_long else OFTEN_COUNTED
    assert not {what for what in seen if not run.seen[what]}, told
    assert not {what for what in counted if not getattr(run.client.counters, what)}, told
    assert run.seen["growth"] <= GROWTH, told


@pytest.mark.parametrize("num_requests", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_through_the_client(model: Path, tmp_path: Path, num_requests: int):
    tokenizer = Tokenizer(METADATA)
    ids = range(tokenizer.vocab_size)
    vocabulary = Vocabulary(
        tokens=[tokenizer.token_bytes(id) for id in ids],
        control_ids=[id for id in ids if tokenizer.is_control(id)],
        end_ids=[END],
    )
    disk = BoundedFolder(str(tmp_path), 8 << 20, "prefix")
    check(asyncio.run(soak(model, vocabulary, disk, num_requests)), is_long=num_requests > 1000)


async def soak_server(model: Path, home: Path, num_requests: int) -> None:
    asked = bodies(1)
    options = (str(model), "--served-name", "m", "--context", str(CONTEXT))
    quiet = {"PELTON_PREFIX_CACHE": "false", "PELTON_SPECULATION": "off"}
    with serving(home, *options, **quiet) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            expected = await quiet_answers_of(client, asked)
    little = {"PELTON_KV_MEMORY": str(SERVER_KV), "PELTON_SWAP_MEMORY": str(1 << 18)}
    limits = ("--max-sequences", "8", "--max-queue", "3", "--max-batch-tokens", "96")
    with serving(home, *options, *limits, **little) as server:
        (engine,) = server.engines()
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            run = HTTPSoak(client, asked, expected)
            await run.run(num_requests // 4, 16)
            before = [private_bytes(pid) for pid in (server.process.pid, engine)]
            await run.run(num_requests - num_requests // 4, 16)
            await asyncio.sleep(1.5)  # the engine is idle, looks over its blocks, and would end if any were lost
            assert (await quiet_answers_of(client, asked[:1]))[0][0] == expected[0][0]
        after = [private_bytes(pid) for pid in (server.process.pid, engine)]
        assert engine in server.engines()
    assert not [line for line in server.lines if "Traceback" in line or "ERROR" in line]
    told = f"{dict(run.seen)} {before} {after}"
    seen = ("whole", "stream", "left", "leave stream", "bad", *(("came again",) if num_requests > 500 else ()))
    assert all(run.seen[what] for what in seen), told
    assert all(then - now <= GROWTH for then, now in zip(after, before, strict=True)), told


@pytest.mark.parametrize("num_requests", [80, pytest.param(1000, marks=pytest.mark.slow)])
def test_over_http(tmp_path: Path, num_requests: int):
    asyncio.run(soak_server(tiny_model.write(tmp_path, "windows"), tmp_path, num_requests))
