"""What a terminal chat remembers, whatever becomes of its answers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pelton.cli.chat import Session
from pelton.errors import Unavailable
from tests.server.scripted import ScriptedService


class OneModel:
    """A pool with one model."""

    def __init__(self, service: ScriptedService) -> None:
        self.service = service

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ScriptedService]:
        yield self.service


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def session(service: ScriptedService) -> Session:
    options = {"system": "Be kind.", "max_tokens": None, "temperature": 0.0, "top_p": 1.0, "seed": 1}
    return Session("m", OneModel(service), verbose=True, **options)  # type: ignore[arg-type]


def asked(service: ScriptedService) -> list[tuple[str, object]]:
    """The messages of the last request."""
    return [(message.role, message.content) for message in service.requests[-1].messages or ()]


def test_later_questions_stand_after_earlier_answers(session: Session, service: ScriptedService) -> None:
    async def chat() -> None:
        await session.interruptible("Hi")
        service.words = ()
        await session.interruptible("And?")
        await session.interruptible("Well?")

    asyncio.run(chat())
    first = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello 🦙")]
    assert asked(service) == [*first, ("user", "And?"), ("assistant", ""), ("user", "Well?")]


@pytest.mark.parametrize("num_words", [0, 1])
@pytest.mark.parametrize("how", ["refused", "broken", "stopped"])
def test_a_question_stays_with_what_was_answered_and_goes_without(
    session: Session, service: ScriptedService, num_words: int, how: str
) -> None:
    async def stop() -> None:
        while not service.num_open:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    async def chat() -> None:
        if how == "refused":
            service.refuse = Unavailable("not now")
        elif how == "broken":
            service.fail_after = num_words
        else:
            service.hang_after = num_words
        stopping = [stop()] if how == "stopped" else []
        await asyncio.gather(session.interruptible("Hi"), *stopping)
        service.refuse = service.fail_after = service.hang_after = None
        await session.interruptible("Again")

    asyncio.run(chat())
    has_answer = num_words > 0 and how != "refused"
    kept = [("user", "Hi"), ("assistant", "Hel")] if has_answer else []
    assert asked(service) == [("system", "Be kind."), *kept, ("user", "Again")]


def test_what_was_not_said_on_the_command_line_is_the_models_to_say(service: ScriptedService) -> None:
    options = {"system": None, "max_tokens": None, "temperature": None, "top_p": 0.5, "seed": None}
    asyncio.run(Session("m", OneModel(service), verbose=False, **options).answer("Hi"))  # type: ignore[arg-type]
    (request,) = service.requests
    assert (request.sampling.temperature, request.sampling.top_p) == (0.7, 0.5)
    assert {"temperature", "stop", "max_tokens"} <= set(request.left_open)
    assert "top_p" not in request.left_open
