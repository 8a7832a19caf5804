"""The input line of the terminal chat: history over sessions, and texts of several lines."""

from __future__ import annotations

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory

from pelton import config

FENCE = '"""'


class Prompt:
    """Reads what the user types."""

    def __init__(self) -> None:
        home = config.load().hub.home
        home.mkdir(parents=True, exist_ok=True)
        self._session: PromptSession[str] = PromptSession(history=FileHistory(str(home / "chat-history")))

    async def read(self) -> str | None:
        """One message; empty after Ctrl-C, None at the end of input."""
        try:
            line = await self._session.prompt_async(">>> ")
            if line.lstrip().startswith(FENCE):
                return await self._fenced(line.lstrip()[len(FENCE) :])
            lines = [line]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(await self._session.prompt_async("... "))
            return "\n".join(lines).strip()
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None

    async def _fenced(self, line: str) -> str:
        """Lines up to the closing fence."""
        lines: list[str] = []
        while not line.rstrip().endswith(FENCE):
            lines.append(line)
            line = await self._session.prompt_async("... ")
        lines.append(line.rstrip()[: -len(FENCE)])
        return "\n".join(lines).strip()
