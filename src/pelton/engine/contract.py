"""What whoever sends requests to an engine knows of it, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from pelton.engine.protocol import Counters, EngineInfo, Vocabulary
from pelton.request import EngineRequest, Event


class Engine(Protocol):
    """One loaded model: ids in, events out. All methods belong to one event loop."""

    @property
    def info(self) -> EngineInfo:
        """What is loaded."""
        ...

    @property
    def pid(self) -> int | None:
        """Of its process, while it has one of its own."""
        ...

    def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        """The events of a request; closing them early aborts it."""
        ...

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its choices."""
        ...

    @property
    def counters(self) -> Counters:
        """What was done so far, and what is held now."""
        ...

    def unpin(self, request_id: str) -> None:
        """Pin the prompt of that request no longer."""
        ...

    @property
    def trouble(self) -> Exception | None:
        """Why it could not be started again, after it has died."""
        ...

    @property
    def has_vocabulary(self) -> bool:
        """Has it been taught what grammars are made of?"""
        ...

    def teach(self, vocabulary: Vocabulary) -> None:
        """What grammars are made of."""
        ...

    async def close(self) -> None:
        """End the engine."""
        ...
