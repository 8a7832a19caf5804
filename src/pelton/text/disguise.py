"""Keeping a client's text apart from a template's, so that no text becomes a control token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pelton.errors import InvalidRequest

if TYPE_CHECKING:
    from pelton.text.tokenizer import Tokenizer


Run = Callable[[list[dict[str, Any]]], list[str]]


class Prompt(NamedTuple):
    """A rendered chat: the text, and the same cut into text (str) and control tokens (their ids)."""

    text: str
    segments: list[str | int]


class Disguise:
    """Tells a client's text from the template's in a rendering.

    Templates trim, slice, measure and split what they are given, so the client's strings cannot be marked by anything
    that changes their length or edges. Instead the first character of every control token (mostly just `<`) is replaced
    in the client's strings, one for one, by a private character. In such a rendering every control token found was
    written by the template. Changed back, it must equal the rendering of the untouched strings. Where it does not
    (the template looks for such characters itself), the untouched rendering is taken if it has the same control
    tokens in the same order, hence none of the client's; else the request is refused.

    Strings that the template itself looks for (`</think>`) stay as they are where they are no control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        self._tokenizer = tokenizer
        self._initials = {text[0] for text in tokenizer.control_texts}
        literals = {
            literal
            for literal in _literals(source)
            if literal[0] in self._initials and not self._looks_like_control(literal)
        }
        kept = "|".join(map(re.escape, sorted(literals))) or "(?!)"
        self._kept = re.compile(kept)
        self._hideable = re.compile(f"(?!{kept})[{re.escape(''.join(sorted(self._initials)))}]")

    def render(self, inputs: dict[str, Any], run: Run, private: Iterator[str]) -> Prompt:
        """`run` renders with each of the inputs that it is given; `private` are characters that no input holds."""
        if not any(not self._initials.isdisjoint(text) for text in strings(inputs)):
            (plain,) = run([inputs])
            return Prompt(plain, self._cut(plain, {}))
        masks = dict(zip(sorted(self._initials), private, strict=False))
        back = {ord(mask): initial for initial, mask in masks.items()}
        plain, hidden = run([inputs, self._hide(inputs, masks)])
        if hidden.translate(back) == plain:
            return Prompt(plain, self._cut(hidden, back))
        segments = self._cut(plain, {})
        if _ids(segments) != _ids(self._cut(hidden, back)):
            raise InvalidRequest(
                "the messages hold the text of control tokens, and the model's chat template changes them in a way in "
                "which they cannot be kept apart from its own",
                param="messages",
            )
        return Prompt(plain, segments)

    def _hide(self, inputs: dict[str, Any], masks: Mapping[str, str]) -> dict[str, Any]:
        table = str.maketrans(dict(masks))

        def hide(text: str) -> str:
            if self._kept.search(text):
                return self._hideable.sub(lambda match: masks[match[0]], text)
            return text.translate(table)

        hidden: dict[str, Any] = _mapped(inputs, hide)
        for message, original in zip(hidden["messages"], inputs["messages"], strict=True):
            message["role"] = original["role"]  # A checked word, and templates compare it.
        return hidden

    def _looks_like_control(self, literal: str) -> bool:
        if any(self._tokenizer.find_controls(literal)):
            return True
        return any(text.startswith(literal) for text in self._tokenizer.control_texts)

    def _cut(self, text: str, back: dict[int, str]) -> list[str | int]:
        segments: list[str | int] = []
        at = 0
        for start, name in self._tokenizer.find_controls(text):
            if start > at:
                segments.append(text[at:start].translate(back))
            id = self._tokenizer.control_id(name)
            assert id is not None
            segments.append(id)
            at = start + len(name)
        if at < len(text):
            segments.append(text[at:].translate(back))
        return segments


def _literals(source: str) -> Iterator[str]:
    """The strings of two characters or more that a template's expressions name, up to their first escape."""
    for code in re.findall(r"\{[{%].*?[%}]\}", source, re.DOTALL):
        for single, double in re.findall(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", code, re.DOTALL):
            literal = (single or double).partition("\\")[0]
            if len(literal) >= 2:
                yield literal


def _ids(segments: Sequence[str | int]) -> list[int]:
    return [segment for segment in segments if isinstance(segment, int)]


_NAME = re.compile(r"[\w.\-]*")


MAX_DEPTH = 100
"""How deep tools and arguments may be nested."""


def strings(value: Any, depth: int = 0) -> Iterator[str]:
    """Every string in plain data; of keys those that are not just names. Raises `InvalidRequest` for data that is
    nested too deeply for a template."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"messages, tools or template arguments are nested over {MAX_DEPTH} deep", param="tools")
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (key for key in value if not _NAME.fullmatch(key))
        for item in value.values():
            yield from strings(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item, depth + 1)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Plain data with `change` done to every string that `strings` finds."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key if _NAME.fullmatch(key) else change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def private_characters(haystack: str) -> Iterator[str]:
    """Private-use characters that are not in `haystack`."""
    used = set(haystack)
    return (chr(code) for code in range(0xF0000, 0x10FFFE) if chr(code) not in used)
