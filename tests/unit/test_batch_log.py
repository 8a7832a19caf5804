"""The record of a batch, where the disk takes a part of what is written, or nothing."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from pelton.server.batch_log import BatchLog
from pelton.server.batch_types import LineResponse, OutputLine


def line(id: str) -> OutputLine:
    body = msgspec.Raw(msgspec.json.encode({"text": "x" * 100}))
    response = LineResponse(status_code=200, request_id=id, body=body)
    return OutputLine(id=id, custom_id=id, response=response, error=None)


@contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """No file may get longer than that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_could_not_be_written_is_not_there_later_either(tmp_path: Path) -> None:
    async def run() -> None:
        log = BatchLog(tmp_path / "output", tmp_path / "errors")
        await log.open()
        await log.add([line("a")])
        with full_after(300), pytest.raises(OSError, match="too large"):
            await log.add([line("b")])
        await log.add([line("c")])
        log.end()
        assert log.done == {"a", "c"}

    asyncio.run(run())
    lines = [msgspec.json.decode(text, type=OutputLine) for text in (tmp_path / "output").read_bytes().splitlines()]
    assert [each.custom_id for each in lines] == ["a", "c"]
