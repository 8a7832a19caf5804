"""The lines of a batch's input file, and what can be wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from pelton.server.batch_types import InputLine, LineBody, LineError

MAX_ERRORS = 50
"""Errors that a batch lists."""
MAX_CUSTOM_ID = 512
_decoder = msgspec.json.Decoder(InputLine)
_body_decoder = msgspec.json.Decoder(LineBody)
_BOM = b"\xef\xbb\xbf"


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What an input file has. It is good where there are no errors."""

    total: int
    model: str | None
    errors: list[LineError]


def lines(path: Path, max_line: int = 1 << 40) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of the lines that are not blank. Of one that is longer than `max_line` there are
    `max_line` + 1 bytes."""
    with path.open("rb") as file:
        for number in range(1, 1 << 62):
            line = file.readline(max_line + 1)
            if not line:
                return
            if len(line) > max_line and not line.endswith(b"\n"):
                _skip_line(file, max_line)
            if number == 1:
                line = line.removeprefix(_BOM)
            if stripped := line.strip():
                yield number, line if len(line.rstrip(b"\r\n")) > max_line else stripped


def _skip_line(file: BinaryIO, step: int) -> None:
    while (rest := file.readline(step)) and not rest.endswith(b"\n"):
        pass


def read(line: bytes) -> InputLine:
    """A line that was checked."""
    return _decoder.decode(line)


def check(path: Path, endpoint: str, *, max_lines: int, max_line: int) -> Checked:
    """Read the whole file and tell what is wrong with it."""
    seen: dict[str, int] = {}
    model: str | None = None
    errors: list[LineError] = []
    total = 0
    for number, line in lines(path, max_line):
        total += 1
        if total > max_lines:
            message = f"the file has more than {max_lines} requests, which is as many as a batch may have"
            errors.append(LineError(code="too_many_tasks", message=message, line=number))
            break
        try:
            given, its_model = _checked(line, endpoint, max_line)
            if given.custom_id in seen:
                message = f"custom_id {given.custom_id[:100]!r} is that of line {seen[given.custom_id]}, too"
                raise _Wrong("duplicate_custom_id", message, "custom_id")
            seen[given.custom_id] = number
            model = model or its_model
            if its_model != model:
                message = f"the model is {its_model[:100]!r}, and {model[:100]!r} before: a batch has one model"
                raise _Wrong("mismatched_model", message, "body.model")
        except _Wrong as wrong:
            errors.append(LineError(code=wrong.code, message=wrong.message, param=wrong.param, line=number))
            if len(errors) == MAX_ERRORS:
                break
    if not total:
        errors.append(LineError(code="empty_file", message="the input file has no requests", param="input_file_id"))
    return Checked(total=total, model=model, errors=errors)


class _Wrong(Exception):
    """What is wrong with a line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def _checked(line: bytes, endpoint: str, max_line: int) -> tuple[InputLine, str]:
    """A line and the model that it asks. Raises `_Wrong`."""
    if len(line) > max_line:
        raise _Wrong("line_too_long", f"the line is longer than {max_line} bytes")
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise _Wrong("invalid_encoding", f"the line is not UTF-8: its byte {error.start} is none there") from None
    try:
        given = _decoder.decode(line)
    except msgspec.ValidationError as error:
        raise _invalid(error, "") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _Wrong("invalid_json_line", f"the line is not valid JSON: {error}"[:300]) from None
    if not 0 < len(given.custom_id) <= MAX_CUSTOM_ID:
        raise _Wrong("invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID} characters", "custom_id")
    if given.url != endpoint:
        message = f"the url is {given.url[:100]!r}, but the batch is one of {endpoint}"
        raise _Wrong("mismatched_url", message, "url")
    try:
        return given, _body_decoder.decode(given.body).model
    except (msgspec.DecodeError, RecursionError) as error:
        raise _invalid(error, "body") from None


def _invalid(error: Exception, inside: str) -> _Wrong:
    """What a line's type refuses, with the name of the field."""
    message, _, path = str(error).partition(" - at `$")
    missing = re.search(r"missing required field `(\w+)`", message)
    names = [inside, path.strip("`."), missing[1] if missing else ""]
    param = ".".join(filter(None, names)) or None
    code = "missing_required_parameter" if missing else "invalid_request"
    return _Wrong(code, f"{param or 'the line'}: {message}"[:300], param)
