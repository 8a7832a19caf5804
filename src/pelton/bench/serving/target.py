"""A server that is to be driven: which model it has, how it counts, and what it says in streams."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import msgspec

from pelton.bench.serving.http import Address, send
from pelton.bench.serving.wire import PATHS, Answer, Endpoint, Models, Prompt, Reader, Usage, body
from pelton.bench.serving.words import Counting, text
from pelton.errors import InvalidRequest

FEW_WORDS, MANY_WORDS = 8, 72


@dataclass(frozen=True)
class Target:
    """A server's first model. `weight_bytes`: None where the server does not tell. `has_usage`: do its streams end
    with usage?"""

    name: str
    address: Address
    model: str
    weight_bytes: int | None
    endpoint: Endpoint
    counting: Counting
    has_usage: bool


async def find(
    name: str,
    address: Address,
    endpoint: Endpoint = "completions",
    timeout: float = 600,
    *,
    has_system: bool = False,
) -> Target:
    """The first model that a server lists, asked three short things to know it. `has_system`: count prompts that have
    a text of a system (without one, a template may put in its own). Raises `InvalidRequest` where none answers."""
    try:
        async with asyncio.timeout(timeout):
            card = msgspec.json.decode(await _whole(address, "GET", "/v1/models", b""), type=Models).data[0]
            target = Target(name, address, card.id, card.weight_bytes, endpoint, Counting(0, 1), True)
            few, many = [await _count(target, num_words, has_system) for num_words in (FEW_WORDS, MANY_WORDS)]
            system = FEW_WORDS if has_system else 0
            counting = Counting.fitted((FEW_WORDS + system, few), (MANY_WORDS + system, many))
            return replace(target, counting=counting, has_usage=await _has_usage(target))
    except TimeoutError:
        problem = f"no answer in {timeout:g} s"
    except (OSError, IndexError, msgspec.MsgspecError) as error:
        problem = str(error)
    raise InvalidRequest(f"{address.url} does not answer as an OpenAI-compatible server: {problem}")


async def _whole(address: Address, method: str, path: str, data: bytes) -> bytes:
    pieces: list[bytes] = []
    status = await send(address, method, path, data, lambda _, piece: pieces.append(piece))
    answer = b"".join(pieces)
    if status != 200:
        raise ConnectionError(f"{path} says {status}: {answer[:200].decode(errors='replace')}")
    return answer


async def _count(target: Target, num_words: int, has_system: bool) -> int:
    """Prompt tokens of so many words, after FEW_WORDS of a system."""
    prompt = Prompt(text("count", num_words), text("system", FEW_WORDS) if has_system else None)
    asked = body(target.model, target.endpoint, prompt, 1, is_stream=False)
    answer = await _whole(target.address, "POST", PATHS[target.endpoint], asked)
    usage = msgspec.json.decode(answer, type=Answer).usage
    if usage is None:
        raise ConnectionError("an answer says no usage, so that nothing can be counted")
    return usage.prompt_tokens


async def _has_usage(target: Target) -> bool:
    reader = Reader()
    asked = body(target.model, target.endpoint, Prompt(text("usage", FEW_WORDS)), 2, is_stream=True)
    await send(target.address, "POST", PATHS[target.endpoint], asked, reader.receive)
    if reader.error:
        raise ConnectionError(reader.error)
    return isinstance(reader.usage, Usage)
