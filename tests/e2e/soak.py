"""Requests of all kinds, by users who leave, abort, lose patience and come again: what a soak test puts on an engine.

`kinds` are drawn from a seed. An answer is kept as `Answer`, so that it can be compared with that of a quiet run.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from pelton.engine.client import EngineClient
from pelton.request import (
    Accepted,
    Done,
    EngineRequest,
    ErrorEvent,
    Event,
    Finish,
    Grammar,
    PromptEvent,
    SamplingParams,
    TokenEvent,
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 1}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4}


def kinds(seed: int, vocab: int, end_id: int) -> list[EngineRequest]:
    """Requests that a model with these ids and a context of 768 tokens can answer."""
    rng = random.Random(seed)

    def words(length: int) -> list[int]:
        return [rng.randrange(3, vocab) for _ in range(length)]

    def looped(length: int, period: int) -> list[int]:
        return (words(period) * (length // period + 1))[:length]

    systems = [words(length) for length in (64, 200, 390)]

    def prompt() -> list[int]:
        """One in three begins as others do."""
        own = words(rng.choice([1, 5, 31, 32, 33, 70]))
        return [*rng.choice(systems), *own] if rng.random() < 0.4 else own

    drawn = {"temperature": 1.0}
    asked: list[tuple[list[int], dict[str, object]]] = [
        *((prompt(), {}) for _ in range(6)),
        *((prompt(), drawn | {"top_p": 0.9, "top_k": 40}) for _ in range(4)),
        *((looped(rng.randrange(60, 300), rng.randrange(3, 30)), {"max_tokens": 120}) for _ in range(6)),
        *((looped(100, 7), {"max_tokens": 80, "temperature": 0.3}) for _ in range(2)),
        *((words(length), {"max_tokens": 8}) for length in (500, 640, 760)),
        *((prompt(), drawn | {"n": n}) for n in (2, 3, 4)),
        *((prompt(), drawn | {"n": 3, "logprobs": 0}) for _ in range(2)),  # as best_of is asked
        *((prompt(), {"use_beam_search": True, "n": 2, "beam_width": width}) for width in (2, 3, 4)),
        (prompt(), {"use_beam_search": True, "n": 1, "beam_width": 3, "logprobs": 2, "early_stopping": True}),
        *((prompt(), drawn | {"logprobs": 3}) for _ in range(2)),
        *((prompt(), {"prompt_logprobs": 2, "n": n, **drawn}) for n in (1, 2)),
        (prompt(), {"prompt_logprobs": 1, "max_tokens": 0}),
        (looped(90, 9), {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}),
        (looped(90, 9), {"dry_multiplier": 1.0, "max_tokens": 60}),
        (prompt(), drawn | {"mirostat_mode": 2, "mirostat_tau": 3.0, "n": 2}),
        (prompt(), drawn | {"typical_p": 0.8, "top_n_sigma": 2.0, "xtc_probability": 0.5, "min_p": 0.02}),
        (prompt(), {"min_tokens": 6, "stop_token_ids": tuple(range(3, vocab, 4))}),
        (prompt(), drawn | {"logit_bias": {7: 4.0, 9: -6.0}, "allowed_token_ids": tuple(range(0, vocab, 2))}),
        (prompt(), {"max_tokens": 1}),
        (prompt(), {"ignore_eos": True, "max_tokens": 150}),
    ]
    plain = [_ask(ids, rng.randrange(1 << 30), end_id, params) for ids, params in asked]
    bound = [
        msgspec.structs.replace(_ask(prompt(), rng.randrange(1 << 30), end_id, params), grammar=_grammar(schema))
        for schema in (PERSON, LIST, {"type": "object"})
        for params in ({"max_tokens": 60}, drawn | {"max_tokens": 60, "n": 2})
    ]
    salted = [msgspec.structs.replace(one, cache_salt="other") for one in rng.sample(plain, 4)]
    banned = [msgspec.structs.replace(plain[0], bad_words_ids=((5,), (7, 8)))]
    return [*plain, *bound, *salted, *banned]


def _ask(prompt_ids: list[int], seed: int, end_id: int, params: dict[str, object]) -> EngineRequest:
    sampling = SamplingParams(**({"max_tokens": 24, "temperature": 0.0, "seed": seed} | params))  # type: ignore[arg-type]
    return EngineRequest(id="", prompt_ids=prompt_ids, sampling=sampling, end_ids=(end_id,))


def _grammar(schema: object) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(schema), param="response_format")


def bad_kinds(vocab: int, context: int) -> list[tuple[EngineRequest, str]]:
    """Requests that are refused, with the error's name."""
    good = _ask([5, 6, 7], 1, 2, {})
    replace = msgspec.structs.replace

    def sampled(**params: object) -> EngineRequest:
        return replace(good, sampling=replace(good.sampling, **params))

    return [
        (replace(good, prompt_ids=[]), "InvalidRequest"),
        (replace(good, prompt_ids=[5, vocab]), "InvalidRequest"),
        (replace(good, prompt_ids=[5] * context), "ContextLengthExceeded"),
        (sampled(max_tokens=context), "ContextLengthExceeded"),
        (sampled(n=1000), "InvalidRequest"),
        (sampled(use_beam_search=True, n=3, beam_width=2), "InvalidRequest"),
        (sampled(logit_bias={vocab: 1.0}), "InvalidRequest"),
        (sampled(logits_processors=("nobody has it",)), "InvalidRequest"),
        (replace(good, grammar=_grammar({"type": "array", "uniqueItems": True})), "InvalidRequest"),
        (replace(good, grammar=_grammar({"type": "string", "enum": []})), "InvalidRequest"),
    ]


@dataclass
class Answer:
    """What a request was told, apart by choice: events without its id."""

    prompt: list[PromptEvent] = field(default_factory=list)
    choices: dict[int, list[TokenEvent]] = field(default_factory=dict)
    ends: dict[int, Finish] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        """Note an event, and hold it against the law of events."""
        if isinstance(event, PromptEvent):
            self.prompt.append(msgspec.structs.replace(event, request_id=""))
        elif isinstance(event, TokenEvent):
            assert event.choice not in self.ends, "a token after its choice's end"
            self.choices.setdefault(event.choice, []).append(msgspec.structs.replace(event, request_id=""))
        elif isinstance(event, Finish):
            assert event.choice not in self.ends, "a choice that ends twice"
            self.ends[event.choice] = msgspec.structs.replace(event, request_id="")

    def check(self, quiet: Answer) -> None:
        """A choice that came to its end is that of the quiet run; one that did not is the beginning of it."""
        assert self.prompt == quiet.prompt[: len(self.prompt)]
        for choice, told in self.choices.items():
            assert told == quiet.choices[choice][: len(told)]
        for choice, end in self.ends.items():
            if end.reason in ("stop", "length"):
                assert end == quiet.ends[choice]
                assert self.choices.get(choice, []) == quiet.choices.get(choice, [])
                assert self.prompt == quiet.prompt


FATES = ["end"] * 10 + ["abort", "abort", "leave", "leave", "cut", "timeout", "queue timeout"]
ENDS = {"timeout": "TimedOut", "queue timeout": "QueueTimeout"}


@dataclass
class Soak:
    """Users of one engine, all of whom are told what the quiet run told. `expected`: by place in `kinds`."""

    client: EngineClient
    kinds: list[EngineRequest]
    expected: list[Answer]
    bad: list[tuple[EngineRequest, str]]
    seed: int = 1
    seen: Counter[str] = field(default_factory=Counter)
    """What happened how often."""

    async def run(self, num_requests: int, num_users: int) -> None:
        """So many requests, in all."""
        numbers = iter(range(self.seen["asked"], self.seen["asked"] + num_requests))
        async with asyncio.TaskGroup() as users:
            for user in range(num_users):
                users.create_task(self._use(numbers, f"user {user % 5}"))

    async def end(self) -> None:
        """Nothing is held any more. The engine looks over its blocks as it becomes idle, and ends if any is lost."""
        deadline = time.monotonic() + 20
        for pin in self.client.counters.pins:
            self.client.unpin(pin.id)
        while True:
            await asyncio.sleep(1.1)  # idle engines tell their counters once a second
            held = self.client.counters
            if not (held.num_running or held.num_waiting or held.kv_blocks_used or held.pins):
                break
            assert time.monotonic() < deadline, held
        done = [event async for event in self.client.submit(msgspec.structs.replace(self.kinds[0], id="last"))]
        assert isinstance(done[-1], Done)

    async def _use(self, numbers: Iterator[int], tenant: str) -> None:
        for number in numbers:
            rng = random.Random(f"{self.seed} {number}")
            self.seen["asked"] += 1
            turn = rng.random()
            if turn < 0.06:
                await self._ask_badly(rng, number)
            elif turn < 0.12:
                await self._pin(rng, number)
            else:
                await self._ask(rng, number, tenant)
            await asyncio.sleep(rng.choice([0, 0, 0, 0.002, 0.02]))

    async def _ask_badly(self, rng: random.Random, number: int) -> None:
        one, kind = rng.choice(self.bad)
        one = msgspec.structs.replace(one, id=f"bad {number}")
        events = [event async for event in self.client.submit(one)]
        if not (one.grammar is not None and _is_crowded(events[-1])):
            assert [event.kind for event in events if isinstance(event, ErrorEvent)] == [kind], (one, events)
            assert len(events) == 1
        self.seen["bad"] += 1

    async def _pin(self, rng: random.Random, number: int) -> None:
        prompt_ids = rng.choice([one.prompt_ids for one in self.kinds if len(one.prompt_ids) < 300])
        sampling = SamplingParams(max_tokens=0, seed=0)
        id = f"pin {number}"
        one = EngineRequest(id=id, prompt_ids=prompt_ids, sampling=sampling, pin_ttl=rng.choice([0.05, 0.5, 30.0]))
        events = [event async for event in self.client.submit(one)]
        if isinstance(events[-1], Done):
            self.seen["pinned"] += 1
            await asyncio.sleep(rng.random() / 10)
            self.client.unpin(id)
        else:
            assert events[-1].kind in ("InvalidRequest", "Overloaded")

    async def _ask(self, rng: random.Random, number: int, tenant: str) -> None:
        place = rng.randrange(len(self.kinds))
        fate = rng.choice(FATES)
        limit = rng.random() ** 2 / 10 + 0.001
        one = msgspec.structs.replace(
            self.kinds[place],
            id=str(number),
            tenant=tenant,
            priority=rng.choice([0, 0, 0, 1, -1]),
            timeout=limit if fate == "timeout" else None,
            queue_timeout=limit if fate == "queue timeout" else None,
        )
        after = rng.randrange(1, 30) if fate in ("abort", "leave", "cut") else 1 << 30
        while not await self._follow(one, self.expected[place], fate, after):
            self.seen["came again"] += 1
            await asyncio.sleep(0.02 + rng.random() / 10)

    async def _follow(self, one: EngineRequest, quiet: Answer, fate: str, after: int) -> bool:
        """Whether it was taken at all."""
        answer, events = Answer(), 0
        stream = self.client.submit(one)
        async for event in stream:
            events += 1
            assert isinstance(event, Accepted | ErrorEvent) == (events == 1) or isinstance(event, ErrorEvent)
            if events == 1 and _is_crowded(event):
                return False
            answer.take(event)
            if events == after and fate == "leave":
                await stream.aclose()  # type: ignore[attr-defined]
                break
            if events == after:
                self.client.abort(one.id, None if fate == "abort" else one.sampling.n - 1)
        answer.check(quiet)
        self._check_end(one, answer, event, fate)
        return True

    def _check_end(self, one: EngineRequest, answer: Answer, last: Event, fate: str) -> None:
        reasons = {end.reason for end in answer.ends.values()}
        if isinstance(last, ErrorEvent):
            assert last.kind == ENDS.get(fate), last
            self.seen[last.kind] += 1
        elif isinstance(last, Done):
            assert len(answer.ends) == one.sampling.n
            assert last.usage.prompt_tokens == len(one.prompt_ids)
            assert reasons <= {"stop", "length"} | ({"abort"} if fate in ("abort", "cut") else set())
            self.seen["aborted" if "abort" in reasons else "ended"] += 1
        else:
            assert fate == "leave"
            self.seen["left"] += 1


def _is_crowded(event: Event) -> bool:
    if not (isinstance(event, ErrorEvent) and event.kind == "Overloaded"):
        return False
    assert event.retry_after is not None
    assert event.retry_after > 0
    return True


async def quiet_answers(client: EngineClient, kinds: list[EngineRequest]) -> list[Answer]:
    """Each alone."""
    answers = []
    for number, one in enumerate(kinds):
        answer = Answer()
        async for event in client.submit(msgspec.structs.replace(one, id=str(number))):
            answer.take(event)
        assert isinstance(event, Done), (one, event)
        answers.append(answer)
    return answers
