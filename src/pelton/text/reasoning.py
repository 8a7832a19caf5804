"""What a model thinks before it answers: between which tags, and whether the prompt has opened them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

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


def thinking_switches(template: str, thinking: bool | None, effort: str | None) -> tuple[dict[str, Any], list[str]]:
    """The variables with which a template is told whether and how hard to think; and what it cannot be told."""
    variables: dict[str, Any] = {}
    warnings: list[str] = []
    if thinking is None and effort is not None and effort != "none" and "reasoning_effort" not in template:
        thinking = True
    if effort == "none":
        thinking = False
    elif effort is not None and "reasoning_effort" in template:
        variables["reasoning_effort"] = effort
    if thinking is not None:
        named = [name for name in SWITCHES if re.search(rf"\b{name}\b", template)]
        variables |= dict.fromkeys(named, thinking)
        if not named and tags_of(template) is not None:
            warnings.append(f"this model's chat template has no switch for thinking: it is as without {thinking}")
    return variables, warnings


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
    sink.is_thinking = False
    return True
