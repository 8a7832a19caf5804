"""Modelfiles, in which Ollama's users describe a model: a text -> where the model comes from, and its preset; and back.

    FROM smollm2                      a model of the store, or the path of a .gguf file
    PARAMETER temperature 0.2         see `options`; `stop` may be given several times
    SYSTEM \"\"\"You are Mario.\"\"\"       three quotes hold several lines, one quote (") a part of one
    TEMPLATE, LICENSE, MESSAGE role text

Source: Ollama's document of the format. Instructions may be written in any case; a line that begins with # is a
comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

import msgspec

from pelton import options
from pelton.errors import InvalidRequest
from pelton.hub.preset import Preset, PresetMessage, jinja

INSTRUCTIONS = ("FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "LICENSE", "MESSAGE", "ADAPTER")
ROLES = ("system", "user", "assistant")
QUOTES = '"""'
_COMMAND = re.compile(r"\s*([A-Za-z]+)(?:[ \t]+|$)")


class Modelfile(NamedTuple):
    """A description of a model. `base`: a name, or the path of a file."""

    base: str
    preset: Preset


class _Instruction(NamedTuple):
    line: int
    name: str
    value: str

    def error(self, problem: str) -> InvalidRequest:
        return _error(self.line, f"{self.name}: {problem}")

    def split(self, wanted: str) -> tuple[str, str]:
        """The first word, and the value behind it."""
        word, _, rest = self.value.partition(" ")
        if not word or not rest.strip():
            raise self.error(f"{wanted} and a value are wanted")
        return word, _unquoted(rest.strip(), self.line)


def parse(text: str) -> Modelfile:
    """Raises `InvalidRequest`, which names the line."""
    base = ""
    fields: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    messages: list[PresetMessage] = []
    licenses: list[str] = []
    for each in _instructions(text):
        match each.name:
            case "FROM":
                base = _unquoted(each.value, each.line)
            case "PARAMETER":
                _set(parameters, each)
            case "SYSTEM":
                fields["system"] = _unquoted(each.value, each.line)
            case "TEMPLATE":
                fields["template"] = _template(each)
            case "LICENSE":
                licenses.append(_unquoted(each.value, each.line))
            case "MESSAGE":
                role, content = each.split("a role")
                if role not in ROLES:
                    raise each.error(f"the role is {role[:40]!r}, must be one of {', '.join(ROLES)}")
                messages.append(PresetMessage(role=cast(Literal["user"], role), content=content))
            case _:
                raise each.error("adapters cannot be run yet: merge it into the model's weights")
    if not base:
        raise InvalidRequest("the Modelfile has no FROM", param="modelfile")
    return Modelfile(base, Preset(parameters=parameters, messages=tuple(messages), license=tuple(licenses), **fields))


def write(base: str, preset: Preset) -> str:
    """The text of a Modelfile, which `parse` reads as the same."""
    lines = [f"FROM {base}"]
    lines += [f"TEMPLATE {_quoted(preset.template)}"] if preset.template is not None else []
    lines += [f"SYSTEM {_quoted(preset.system)}"] if preset.system is not None else []
    lines += [f"PARAMETER {line}" for line in parameter_lines(preset)]
    lines += [f"MESSAGE {each.role} {_quoted(each.content)}" for each in preset.messages]
    lines += [f"LICENSE {_quoted(each)}" for each in preset.license]
    return "\n".join(lines) + "\n"


def parameter_lines(preset: Preset) -> list[str]:
    """`name value`, one for each value."""
    return [
        f"{name} {_quoted(each) if isinstance(each, str) else msgspec.json.encode(each).decode()}"
        for name, value in preset.parameters.items()
        for each in (value if isinstance(value, list) else [value])
    ]


def _instructions(text: str) -> Iterator[_Instruction]:
    lines = iter(enumerate(text.replace("\r\n", "\n").split("\n"), start=1))
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        command = _COMMAND.match(line)
        name = command[1].upper() if command else ""
        if command is None or name not in INSTRUCTIONS:
            raise _error(number, f"{line.strip()[:40]!r} begins with none of {', '.join(INSTRUCTIONS)}")
        value = line[command.end() :]
        while _is_open(value):
            following = next(lines, None)
            if following is None:
                raise _error(number, f'{name}: the three quotes (""") are not closed')
            value += "\n" + following[1]
        if not value.strip():
            raise _error(number, f"{name} has no value")
        yield _Instruction(number, name, value.strip())


def _is_open(value: str) -> bool:
    """Do three quotes begin in it, where a value begins, that do not end?"""
    return bool(re.match(rf"(?:\S+[ \t]+)?{QUOTES}", value)) and value.count(QUOTES) == 1


def _unquoted(value: str, line: int) -> str:
    if value.startswith(QUOTES):
        content, _, rest = value.removeprefix(QUOTES).partition(QUOTES)
        if rest.strip():
            raise _error(line, f"{rest.strip()[:40]!r} stands behind the closing quotes")
        return content
    if value.startswith('"') and len(value) > 1 and value.endswith('"'):
        return value[1:-1]
    return value


def _quoted(value: str) -> str:
    return f"{QUOTES}{value}{QUOTES}"


def _set(parameters: dict[str, Any], each: _Instruction) -> None:
    name, text = each.split("a name")
    name = name.lower()
    if name not in options.NAMES | options.NO_EFFECT:
        raise each.error(f"there is no parameter {name[:40]!r}")
    if name == "stop":
        parameters.setdefault(name, []).append(text)
        return
    try:
        options.meaning({name: text}, "PARAMETER", is_text=True)
    except InvalidRequest as error:
        raise each.error(error.message) from None
    known = options.convert({name: text}, "PARAMETER", is_text=True)
    parameters[name] = getattr(known, name) if name in options.NAMES else text


def _template(each: _Instruction) -> str:
    try:
        return jinja(_unquoted(each.value, each.line))
    except InvalidRequest as error:
        raise each.error(error.message) from None


def _error(line: int, problem: str) -> InvalidRequest:
    return InvalidRequest(f"Modelfile, line {line}: {problem}", param="modelfile")
