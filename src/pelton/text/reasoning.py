"""What a model thinks before it answers: between which tags, and whether the prompt has opened them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from pelton.request import Request
from pelton.text.tools.reader import WHITE_SPACE, Reader, Scan, Sink


class Tags(NamedTuple):
    """What thoughts stand between."""

    open: str
    close: str


KNOWN = (
    Tags("<think>", "</think>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<thinking>", "</thinking>"),
    Tags("<reasoning>", "</reasoning>"),
)
"""Those that models use."""


DOES_NOT_THINK = "this model does not think: what is asked about that changes nothing"
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates are told whether the model shall think."""


def tags_of(template: str, control_texts: Iterable[str] = ()) -> Tags | None:
    """The tags that a model thinks between: those that its template names, or its vocabulary has. None: it does not
    think."""
    known = frozenset(control_texts)
    for tags in KNOWN:
        if tags.close in template or {tags.open, tags.close} <= known:
            return tags
    return None


def is_open(prompt: str, tags: Tags) -> bool:
    """Does the prompt end inside of thoughts?"""
    return prompt.rstrip(WHITE_SPACE).endswith(tags.open)


class Switches(NamedTuple):
    """How a model is told whether and how hard to think."""

    variables: dict[str, Any]
    """For its template."""
    budget: int | None
    """Tokens that its thoughts may have."""
    warnings: tuple[str, ...] = ()
    """What it cannot be told."""
    is_off: bool = False
    """Shall it not think? Then a prompt that has opened its thoughts all the same leaves them no token."""


def switches_of(template: str, tags: Tags | None, request: Request) -> Switches:
    """What a request says of thinking, in the words of a template. Where that has no switch, thoughts that are not
    wanted are ended at once."""
    thinking, effort, budget = request.thinking, request.reasoning_effort, request.reasoning_budget
    if effort == "none":
        thinking = False
    if tags is None:
        asked = thinking or (effort is not None and effort != "none") or budget is not None
        return Switches({}, None, (DOES_NOT_THINK,) * bool(asked))
    variables: dict[str, Any] = {}
    if effort is not None and effort != "none":
        if "reasoning_effort" in template:
            variables["reasoning_effort"] = effort
        elif thinking is None:
            thinking = True
    if thinking is None:
        return Switches(variables, budget)
    named = [name for name in SWITCHES if re.search(rf"\b{name}\b", template)]
    variables |= dict.fromkeys(named, thinking)
    return Switches(variables, 0 if not named and not thinking else budget, is_off=not thinking)


def thoughts(reader: Reader, sink: Sink, tags: Tags, *, is_open: bool) -> Scan[bool]:
    """Read what is thought, if the answer begins with that. `is_open`: the prompt has opened it. Was there any?"""
    if not is_open:
        yield from reader.skip_space()
        is_open = yield from reader.literal(tags.open)
        if not is_open:
            reader.put_back()
            return False
        reader.taken()
    sink.trim(start=True, end=True)
    sink.is_thinking = True
    yield from reader.content(sink, [tags.close], is_reasoning=True)
    reader.taken()
    sink.is_thinking = False
    return True
