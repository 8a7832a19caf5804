"""`best_of`: more choices are made than are shown, and the likeliest ones are kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from pelton.request import ChoiceEvent, TextDone, TextEvent, TextFinish, TextPrompt


async def best_of(
    events: AsyncGenerator[TextEvent, None], shown: int, made: int, logprob: Callable[[int], float]
) -> AsyncGenerator[TextEvent, None]:
    """The events of an answer with `made` choices, cut down to the `shown` ones whose tokens have the greatest sum of
    logprobs (`logprob`, of a choice that has ended), the best first. Nothing of a choice is told before all have ended.

    The first event, which says that the request was accepted, goes through at once; so does what is about the prompt.
    """
    kept: list[list[ChoiceEvent]] = [[] for _ in range(made)]
    async with aclosing(events):
        yield await anext(events)
        try:
            async for event in events:
                if not isinstance(event, TextPrompt | TextDone):
                    kept[event.choice].append(event)
                    continue
                if all(each and isinstance(each[-1], TextFinish) for each in kept):
                    ranked = sorted(range(made), key=lambda choice: (-logprob(choice), choice))
                    for place, choice in enumerate(ranked[:shown]):
                        for each in kept[choice]:
                            yield msgspec.structs.replace(each, choice=place)
                yield event
        except Exception:
            for choice in range(shown):
                yield TextFinish(choice=choice, reason="error")
            raise
