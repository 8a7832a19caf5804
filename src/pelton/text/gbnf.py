"""llama.cpp's grammar notation (GBNF) in Lark's, in time proportional to its length.

Source: llama.cpp's grammars/README.md. Rules that refer to nothing but each other, without recursion, become terminals:
these are matched by an automaton, others by a parser, a character at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pelton.text.lark import quoted

ROOT = "root"
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)|(?P<define>::=)|(?P<name>[A-Za-z0-9_-]+)|(?P<text>"(?:[^"\\]|\\.)*")"""
    r"""|(?P<class>\[(?:[^\]\\]|\\.)*\])|(?P<sign>[()|*+?]|\{[0-9]+(?:,[0-9]*)?\})|(?P<any>\.)""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_SPECIAL = frozenset("\\]^-[/&~|")


class _Token(NamedTuple):
    kind: str
    text: str


def lark_of(text: str) -> str:
    """The same grammar in Lark's notation. Raises `ValueError` that says what is wrong."""
    rules = _rules(list(_tokens(text)))
    if ROOT not in rules:
        raise ValueError("there is no rule 'root'")
    references = {name: {each.text for each in body if each.kind == "name"} for name, body in rules.items()}
    for name, named in references.items():
        if unknown := named - rules.keys():
            raise ValueError(f"the rule {name!r} names {min(unknown)!r}, which is none")
    terminals = _terminals(references)
    # Names of terminals are capitals, and no name may mean something in Lark.
    names = {name: f"{'T' if name in terminals else 'r'}{at}" for at, name in enumerate(rules)}
    names[ROOT] = "start"
    return "\n".join(f"{names[name]}: {_body(body, names)}" for name, body in rules.items())


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            line = text.count("\n", 0, at) + 1
            raise ValueError(f"line {line}: {text[at : at + 20]!r} is not understood")
        if found.lastgroup != "space":
            yield _Token(found.lastgroup or "", found[0])
        at = found.end()


def _rules(tokens: Sequence[_Token]) -> dict[str, Sequence[_Token]]:
    """Each rule's right side."""
    starts = [at - 1 for at, token in enumerate(tokens) if token.kind == "define"]
    if not starts or starts[0] != 0 or any(tokens[at].kind != "name" for at in starts):
        raise ValueError("a rule is not of the form: name ::= ...")
    ends = [*starts[1:], len(tokens)]
    rules = {tokens[start].text: tokens[start + 2 : end] for start, end in zip(starts, ends, strict=True)}
    if len(rules) < len(starts):
        raise ValueError("two rules have one name")
    return rules


def _terminals(references: dict[str, set[str]]) -> set[str]:
    """The rules that lead to no recursion."""
    users: dict[str, list[str]] = {name: [] for name in references}
    waits_for = {name: len(named) for name, named in references.items()}
    for name, named in references.items():
        for each in named:
            users[each].append(name)
    ready = [name for name, count in waits_for.items() if not count]
    found: set[str] = set()
    while ready:
        name = ready.pop()
        found.add(name)
        for user in users[name]:
            waits_for[user] -= 1
            if not waits_for[user]:
                ready.append(user)
    return found - {ROOT}


def _body(tokens: Sequence[_Token], names: dict[str, str]) -> str:
    """A right side. An alternative without anything is the empty text."""
    pieces: list[str] = []
    is_empty = True
    for token in tokens:
        if is_empty and token.text in ("|", ")") and token.kind == "sign":
            pieces.append('""')
        is_empty = token.kind == "sign" and token.text in ("|", "(")
        match token.kind:
            case "name":
                pieces.append(names[token.text])
            case "text":
                pieces.append(quoted("".join(_characters(token.text[1:-1]))))
            case "class":
                pieces.append(_class(token.text[1:-1]))
            case "any":
                pieces.append(r"/(.|\n)/")
            case _:
                pieces.append(token.text)
    return " ".join([*pieces, '""'] if is_empty else pieces)


def _characters(text: str) -> Iterator[str]:
    for byte, short, long, named, plain in _ESCAPE.findall(text):
        digits = byte or short or long
        if digits and int(digits, 16) > 0x10FFFF:
            raise ValueError(f"there is no character U+{digits}")
        yield chr(int(digits, 16)) if digits else _NAMED.get(named, named) if named else plain


def _class(text: str) -> str:
    """A set of characters as a regular expression. A hyphen between two stands for all from one to the other."""
    is_negated = text.startswith("^")
    text = text[1:] if is_negated else text
    pieces: list[str] = []
    for found in _ESCAPE.finditer(text):
        is_range = found[0] == "-" and found.start() > 0 and found.end() < len(text)
        pieces.append("-" if is_range else _in_class("".join(_characters(found[0]))))
    if not pieces:
        raise ValueError("a set of characters is empty")
    return "/[" + ("^" if is_negated else "") + "".join(pieces) + "]/"


def _in_class(character: str) -> str:
    if character < " " or character == "\x7f":
        return f"\\x{ord(character):02x}"
    return "\\" + character if character in _SPECIAL else character
