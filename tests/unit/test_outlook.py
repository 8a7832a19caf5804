"""How many streams fit, and which settings are recommended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pelton.config import EngineConfig
from pelton.engine import outlook
from pelton.engine.budget import MemoryNeeds, Wishes, divide, required
from pelton.engine.outlook import look, num_streams
from pelton.engine.protocol import Needs, Start

MIB = 1 << 20


def prepared(start: Start) -> SimpleNamespace:
    """A model of 100 MiB whose keys and values take 1 MiB a block, or 9/16 of that."""
    block = MIB * 9 // 16 if start.config.kv_dtype == "int8" else MIB
    memory = MemoryNeeds(
        weights=90 * MIB,
        arena=10 * MIB,
        bytes_per_block=(block,),
        windows=(None,),
        max_chunk=512,
        max_sequences=start.config.max_sequences,
    )
    wishes = Wishes(start.config.context or 32768, is_fixed=start.config.context > 0)
    return SimpleNamespace(
        memory=memory,
        wishes=wishes,
        draft=None,
        needs=Needs(*required(memory, wishes)),
        plan=lambda available: divide(memory, wishes, available),
    )


@pytest.fixture(autouse=True)
def _no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "Prepared", prepared)


def ask(available: int, **settings: object) -> outlook.Outlook:
    return look(Start(str(Path("m")), EngineConfig(**settings)), available)  # type: ignore[arg-type]


def test_streams_share_the_blocks_and_a_window_bounds_what_one_takes():
    needs = MemoryNeeds(0, 0, (1, 1), (None, 512), 512, 64)
    assert num_streams(needs, (101, 1000), 32) == 64
    assert num_streams(needs, (101, 1000), 320) == 10
    assert num_streams(needs, (10_001, 341), 3200) == 10
    assert num_streams(needs, (2, 2), 3200) == 0


def test_where_there_is_much_memory_all_fits():
    seen = ask(100_000 * MIB)
    assert seen.plan is not None
    assert seen.kv_per_token == MIB / 32
    assert dict(seen.streams)[32768] == (100_000 - 100) // 4 // 1024
    assert seen.advice == outlook.Advice(32768, "f16", 64)


def test_where_there_is_less_a_shorter_context_lets_a_few_fit():
    seen = ask(5000 * MIB)
    assert seen.advice is not None
    assert (seen.advice.context, seen.advice.kv_dtype) == (8192, "f16")
    assert seen.plan is not None
    assert seen.plan.context == 32768


def test_where_there_is_little_keys_and_values_get_smaller():
    seen = ask(190 * MIB)
    assert seen.plan is not None
    assert seen.plan.context == 2848
    assert seen.advice is not None
    assert seen.advice.kv_dtype == "int8"
    assert ask(190 * MIB, kv_dtype="int8").advice == seen.advice


def test_where_there_is_too_little_it_is_said():
    seen = ask(90 * MIB)
    assert (seen.plan, seen.advice, seen.streams) == (None, None, ())
    assert "90.0 MiB for weights" in seen.problem
    asked = ask(400 * MIB, context=32768)
    assert asked.plan is None
    assert "32768 tokens" in asked.problem
    assert asked.advice is not None
    assert asked.advice.context < 32768
