from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.text.stream import StopStrings, TextStream


class Bytes:
    """A tokenizer whose tokens are given byte strings; None is a control token."""

    def __init__(self, tokens: list[bytes | None]) -> None:
        self.tokens = tokens

    def token_bytes(self, id: int) -> bytes:
        token = self.tokens[id]
        return b"<control>" if token is None else token

    def is_control(self, id: int) -> bool:
        return self.tokens[id] is None


def pieces(tokens: list[bytes | None], **options: object) -> tuple[list[str], str | None]:
    """The pieces of a stream that stops as soon as a stop string is found."""
    stream = TextStream(Bytes(tokens), **options)  # type: ignore[arg-type]
    out = []
    for id in range(len(tokens)):
        out.append(stream.feed(id))
        if stream.stopped_by is not None:
            return out, stream.stopped_by
    out.append(stream.finish())
    return out, stream.stopped_by


def cut(data: bytes, cuts: list[int]) -> list[bytes | None]:
    edges = [0, *sorted({c % (len(data) + 1) for c in cuts}), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def slow_stop(text: str, stops: tuple[str, ...], include: bool) -> str:
    """By definition: read on until some stop string is complete, take the longest that is."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[:end] if include else text[: end - len(max(complete, key=len))]
    return text


TEXT = st.text(st.sampled_from("ab é中😀👩\u200d🚀\ufffd\n"), max_size=40)
STOPS = st.lists(st.text(st.sampled_from("ab é中😀"), min_size=1, max_size=5), max_size=3).map(tuple)


@given(st.binary(max_size=40), st.lists(st.integers(0, 99), max_size=20))
def test_any_bytes_in_any_pieces(data: bytes, cuts: list[int]) -> None:
    out, _ = pieces(cut(data, cuts))
    assert "".join(out) == data.decode("utf-8", "replace")


@given(TEXT, st.lists(st.integers(0, 999), max_size=30), STOPS, st.booleans(), st.integers(0, 3))
def test_stop_strings_in_any_pieces(
    text: str, cuts: list[int], stops: tuple[str, ...], include: bool, lost: int
) -> None:
    data = text.encode()[: max(0, len(text.encode()) - lost)]
    out, found = pieces(cut(data, cuts), stop=stops, include_stop=include)
    expected = slow_stop(data.decode("utf-8", "replace"), stops, include)
    assert "".join(out) == expected
    assert (found is not None) == any(stop in data.decode("utf-8", "replace") for stop in stops)


@given(TEXT, st.lists(st.integers(0, 999), max_size=30), STOPS)
def test_pieces_are_never_taken_back(text: str, cuts: list[int], stops: tuple[str, ...]) -> None:
    tokens = cut(text.encode(), cuts)
    whole = "".join(pieces(tokens, stop=stops)[0])
    for count in range(len(tokens)):
        stream = TextStream(Bytes(tokens), stop=stops)  # type: ignore[arg-type]
        sent = "".join(stream.feed(id) for id in range(count))
        assert whole.startswith(sent)
        assert sent + stream.finish() == slow_stop(b"".join(tokens[:count]).decode("utf-8", "replace"), stops, False)


def test_a_character_comes_whole() -> None:
    out, _ = pieces([b"a", b"\xf0\x9f", b"\x98", b"\x80b", b"\xe4\xb8"])
    assert out == ["a", "", "", "😀b", "", "\ufffd"]


def test_a_real_replacement_character_is_kept() -> None:
    assert pieces(["\ufffd".encode(), b"\xef\xbf", b"\xbd"])[0] == ["\ufffd", "", "\ufffd", ""]


def test_no_letter_of_a_stop_string_leaks() -> None:
    out, found = pieces([b"Hi ", b"<", b"/", b"end", b">", b"more"], stop=("</end>",))
    assert (out, found) == (["Hi ", "", "", "", ""], "</end>")


def test_held_text_is_released_when_the_match_fails() -> None:
    out, found = pieces([b"x</", b"e", b"x", b"</"], stop=("</end>",))
    assert (out, found) == (["x", "", "</ex", "", "</"], None)
    assert pieces([b"aa", b"a", b"b"], stop=("aab",))[0] == ["", "a", ""]


def test_a_stop_string_inside_a_token() -> None:
    assert pieces([b"one. two", b"x"], stop=(". ",)) == (["one"], ". ")
    assert pieces([b"one. two"], stop=(". ",), include_stop=True) == (["one. "], ". ")


def test_the_first_complete_stop_string_wins_and_then_the_longest() -> None:
    for tokens in ([b"xabc"], [b"xab", b"c"], [b"x", b"a", b"b", b"c"]):
        assert "".join(pieces(list(tokens), stop=("abc", "b"))[0]) == "xa"
        assert pieces(list(tokens), stop=("c", "abc"))[1] == "abc"


def test_nothing_comes_after_the_end() -> None:
    stops = StopStrings(["b"])
    assert [stops.feed("ab"), stops.feed("c"), stops.flush()] == ["a", "", ""]


def test_control_tokens() -> None:
    tokens: list[bytes | None] = [b"a", None, b"b"]
    assert "".join(pieces(tokens)[0]) == "ab"
    assert "".join(pieces(tokens, skip_special=False)[0]) == "a<control>b"
    assert "".join(pieces(tokens, stop=("a<con",), skip_special=False)[0]) == ""


def test_empty_stop_strings_mean_nothing() -> None:
    assert pieces([b"ab"], stop=("",)) == (["ab", ""], None)


def test_stop_strings_in_the_first_tokens_do_not_count() -> None:
    tokens: list[bytes | None] = [b"ab", b"ab", b"xab"]
    assert pieces(list(tokens), stop=("ab",), min_tokens=2) == (["ab", "ab", "x"], "ab")
    assert pieces(list(tokens), stop=("ba",), min_tokens=1) == (["ab", "a", "bxa", "b"], None)
    assert pieces([b"a", None, b"a"], stop=("a",), min_tokens=2) == (["a", "", ""], "a")


@pytest.mark.parametrize("stop", [(), ("aaaaaaaaaaaaaaaaaaab",) * 4])
def test_time_does_not_grow_with_the_text(stop: tuple[str, ...]) -> None:
    stream = TextStream(Bytes([b"aaaa"]), stop=stop)  # type: ignore[arg-type]

    def once() -> float:
        started = time.perf_counter()
        for _ in range(2000):
            stream.feed(0)
        return time.perf_counter() - started

    early = min(once() for _ in range(3))
    for _ in range(20):
        once()
    assert min(once() for _ in range(3)) < 3 * early
