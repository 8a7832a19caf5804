"""A soak: thousands of requests of all kinds on little memory. Every block comes back, memory stays flat, and who was
answered was answered as in a quiet run, with `==`."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import msgspec
import pytest

from pelton.config import EngineConfig
from pelton.engine.client import EngineClient
from pelton.engine.protocol import Vocabulary
from pelton.formats.bounded_folder import BoundedFolder
from pelton.formats.digest import FileDigest
from pelton.formats.quants import WeightType
from pelton.text.tokenizer import Tokenizer
from tests.e2e.soak import Soak, bad_kinds, kinds, quiet_answers
from tests.models import convert, tiny
from tests.unit.vocabularies import byte_level

END = 2
CONTEXT = 768
CASES = {"llama": ("llama", {}), "windows": ("gemma3", {"sliding_window": 100})}
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


@pytest.fixture(scope="module")
def metadata() -> dict[str, object]:
    return byte_level()


@pytest.fixture(scope="module", params=list(CASES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, metadata) -> Path:
    case, changes = CASES[request.param]
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    changes = {**changes, "max_position_embeddings": 1024, "vocab_size": len(metadata["tokenizer.ggml.tokens"])}
    convert.write(tiny.build(case, **changes), path, lambda name, shape: WeightType.Q8_0, vocabulary=metadata)
    return path


def resident(pid: int) -> int:
    """Bytes of private memory that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


NUM_TOKENS = 1400
"""What KV memory holds: not two contexts."""
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
        before = resident(pid)
        await run.run(num_requests - num_requests // 4, 24)
        await run.end()
        run.seen["growth"] = resident(pid) - before
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
def test_through_the_client(model: Path, metadata, tmp_path: Path, num_requests: int):
    tokenizer = Tokenizer(metadata)
    ids = range(tokenizer.vocab_size)
    vocabulary = Vocabulary(
        tokens=[tokenizer.token_bytes(id) for id in ids],
        control_ids=[id for id in ids if tokenizer.is_control(id)],
        end_ids=[END],
    )
    disk = BoundedFolder(str(tmp_path), 8 << 20, "prefix")
    check(asyncio.run(soak(model, vocabulary, disk, num_requests)), is_long=num_requests > 1000)
