"""A question for a guarded server, and keys for it."""

from __future__ import annotations

MESSAGES = [{"role": "user", "content": "Hi"}]

CHAT = {"model": "scripted", "messages": MESSAGES}

PATH = "/v1/chat/completions"


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}
