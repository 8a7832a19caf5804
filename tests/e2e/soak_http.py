"""What a soak test asks a server: completions and chats of all kinds, by clients who go away, and come again when there
was no place."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from tests.e2e.soak import LIST, PERSON

Body = dict[str, Any]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = (
    "The quick brown fox doesn't jump over 1234567890 lazy dogs. Les élèves étaient là. Привет, как дела? 你好，世界！"
    "😀👍🏽\ndef encode(text):\n    return [ord(c) for c in text if c != ' ']  # a comment, and then some more of it\n"
)


def bodies(seed: int) -> list[tuple[str, Body]]:
    """Paths and bodies, not streamed."""
    rng = random.Random(seed)

    def prompt() -> str:
        start = rng.choice([0, 0, rng.randrange(len(TEXT))])  # many begin as others do
        return (TEXT * 4)[start : start + rng.choice([1, 20, 90, 300, 600])]

    def drawn() -> Body:
        return {"temperature": 1.0, "seed": rng.randrange(1000)}

    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": PERSON}}
    asked: list[Body] = [
        *({"stop": stop} for stop in ("e", ["t", "你"], [" ", "abc"], "zzzz")),
        *({**drawn(), "stop": stop, "n": n} for stop, n in (("s", 1), (["o", "\n"], 3))),
        {**drawn(), "stop": "a", "include_stop_str_in_output": True},
        {**drawn(), "stop": ["r", "i"], "best_of": 3, "n": 2},
        {**drawn(), "n": 3, "logprobs": 2},
        {**drawn(), "logprobs": 1, "stop": "n"},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"echo": True, **drawn()},
        {"use_beam_search": True, "n": 2, "beam_width": 3},
        *({"max_tokens": 100} for _ in range(3)),  # goes round in circles
        *({**drawn(), "max_tokens": 40} for _ in range(4)),
        {**drawn(), "response_format": schema, "max_tokens": 60},
        {"response_format": {"type": "json_object", "schema": LIST}, "max_tokens": 60, "n": 2},
        {**drawn(), "repetition_penalty": 1.3, "bad_words": ["the", "é"]},
        {**drawn(), "prompt_logprobs": 1},
        {**drawn(), "cache_salt": "other"},
    ]
    completions = [(COMPLETIONS, {"max_tokens": 24, "temperature": 0, "prompt": prompt(), **each}) for each in asked]
    several = {"prompt": [prompt(), prompt()], "max_tokens": 20, **drawn()}
    chats = [
        {"messages": [{"role": "user", "content": prompt()}], "max_tokens": 30, **drawn(), **more}
        for more in ({}, {"stop": "l", "n": 2}, {"logprobs": True, "top_logprobs": 2}, {"response_format": schema})
    ]
    return [*completions, (COMPLETIONS, several), *((CHAT, each) for each in chats)]


BAD: list[tuple[str, Body]] = [
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}),
    (COMPLETIONS, {"prompt": "a" * 5000}),
    (COMPLETIONS, {"prompt": "a", "n": 1 << 40}),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}),
    (COMPLETIONS, {"prompt": [5, 1 << 20]}),
    (CHAT, {"messages": "hello"}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object", "schema": {
        "type": "array", "uniqueItems": True}}}),
]  # fmt: skip
FATES = ["whole"] * 5 + ["stream"] * 5 + ["leave", "leave stream", "leave stream", "timeout", "bad"]


def parts_of(choice: Body) -> tuple[str, str | None, list[Any]]:
    """Text, finish reason and logprobs of a choice or of a chunk's choice, of either endpoint."""
    message = choice.get("message") or choice.get("delta")
    text = choice["text"] if message is None else message.get("content") or ""
    logprobs = choice.get("logprobs") or {}
    return text, choice["finish_reason"], logprobs.get("token_logprobs") or logprobs.get("content") or []


@dataclass
class HTTPSoak:
    """Clients of one server. `expected`: the choices and the usage of each body in a quiet run."""

    client: httpx.AsyncClient
    bodies: list[tuple[str, Body]]
    expected: list[tuple[list[Body], Body]]
    seen: Counter[str] = field(default_factory=Counter)
    """What happened how often."""

    async def run(self, num_requests: int, num_users: int) -> None:
        """So many requests, in all."""
        numbers = iter(range(self.seen["asked"], self.seen["asked"] + num_requests))
        async with asyncio.TaskGroup() as users:
            for _ in range(num_users):
                users.create_task(self._use(numbers))

    async def _use(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            rng = random.Random(number)
            self.seen["asked"] += 1
            fate, place = rng.choice(FATES), rng.randrange(len(self.bodies))
            path, body = self.bodies[place]
            if fate == "bad":
                path, body = rng.choice(BAD)
                answer = await self.client.post(path, json={"model": "m", **body})
                assert 400 <= answer.status_code < 500, answer.text
                assert answer.json()["error"]["message"]
            elif fate == "leave":
                await self._leave(path, body, rng)
            elif fate == "timeout":
                await self._time_out(path, body, rng)
            elif "stream" in fate and not {"best_of", "use_beam_search", "prompt_logprobs"} & body.keys():
                after = rng.randrange(1, 20) if "leave" in fate else 1 << 30
                while not await self._stream(path, body, place, after):
                    await self._come_again(rng)
            else:
                while not await self._whole(path, body, place):
                    await self._come_again(rng)
            self.seen[fate] += 1

    async def _come_again(self, rng: random.Random) -> None:
        self.seen["came again"] += 1
        await asyncio.sleep(0.02 + rng.random() / 10)

    async def _whole(self, path: str, body: Body, place: int) -> bool:
        """Whether it was taken."""
        answer = await self.client.post(path, json={"model": "m", **body})
        if _is_crowded(answer):
            return False
        assert answer.status_code == 200, answer.text
        choices, usage = self.expected[place]
        assert answer.json()["choices"] == choices
        assert _counts(answer.json()["usage"]) == _counts(usage)
        return True

    async def _stream(self, path: str, body: Body, place: int, after: int) -> bool:
        """Whether it was taken; left after so many chunks."""
        wanted = {"model": "m", **body, "stream": True, "stream_options": {"include_usage": True}}
        texts: dict[int, str] = {}
        ends: dict[int, str | None] = {}
        logprobs: dict[int, list[Any]] = {}
        usage, num_chunks = None, 0
        async with self.client.stream("POST", path, json=wanted) as answer:
            if _is_crowded(answer):
                return False
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    index, (text, end, told) = choice["index"], parts_of(choice)
                    assert ends.get(index) is None
                    texts[index], ends[index] = texts.get(index, "") + text, end
                    logprobs.setdefault(index, []).extend(told)
                usage = chunk["usage"] or usage
                num_chunks += 1
                if num_chunks == after:
                    break
        quiet = {choice["index"]: parts_of(choice) for choice in self.expected[place][0]}
        for index, text in texts.items():
            if num_chunks < after:
                assert (text, ends[index], logprobs[index]) == quiet[index]
            assert quiet[index][0].startswith(text)
        if num_chunks < after:
            assert len(texts) == len(quiet)
            assert _counts(usage) == _counts(self.expected[place][1])
        return True

    async def _leave(self, path: str, body: Body, rng: random.Random) -> None:
        try:
            async with asyncio.timeout(rng.random() ** 2 / 5):
                await self.client.post(path, json={"model": "m", **body})
        except TimeoutError:
            self.seen["left"] += 1

    async def _time_out(self, path: str, body: Body, rng: random.Random) -> None:
        answer = await self.client.post(path, json={"model": "m", **body, "timeout": 0.001 + rng.random() ** 2 / 10})
        assert answer.status_code in (200, 429, 504), answer.text
        self.seen["timed out"] += answer.status_code == 504


def _is_crowded(answer: httpx.Response) -> bool:
    if answer.status_code != 429:
        return False
    assert int(answer.headers["retry-after"]) >= 1
    return True


def _counts(usage: Body | None) -> tuple[int, int]:
    assert usage is not None
    return usage["prompt_tokens"], usage["completion_tokens"]


async def quiet_answers(client: httpx.AsyncClient, asked: list[tuple[str, Body]]) -> list[tuple[list[Body], Body]]:
    """Choices and usage of each, one after another."""
    answers = []
    for path, body in asked:
        answer = await client.post(path, json={"model": "m", **body})
        assert answer.status_code == 200, (body, answer.text)
        answers.append((answer.json()["choices"], answer.json()["usage"]))
    return answers
