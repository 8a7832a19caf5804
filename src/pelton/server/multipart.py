"""Forms with one file, as multipart/form-data: the file leaves as it comes, the other fields are few and short. The
home of python_multipart."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest

from pelton.errors import InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELDS = 32
MAX_FIELD = 1024
"""Bytes of a field's value, and of its name."""


@dataclass
class Form:
    """What came besides the file's bytes."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    """None: no file came."""


async def read_form(http: HTTPRequest, file_field: str, take: Callable[[bytes], Awaitable[None]]) -> Form:
    """Read a form whose file is the field `file_field`; `take` gets the file's bytes in pieces. Raises `InvalidRequest`
    for what is no such form."""
    # Not at the top: most servers never get a form.
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    kind, options = parse_options_header(http.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequest("the body must be multipart/form-data, with its boundary in the content type")
    reader = _Reader(file_field, parse_options_header)
    try:
        parser = MultipartParser(boundary, reader.callbacks)
        async for chunk in http.stream():
            parser.write(chunk)
            if reader.pending:
                await take(bytes(reader.pending))
                reader.pending.clear()
    except FormParserError as error:
        raise InvalidRequest(f"the body is no valid multipart/form-data: {error}"[:300]) from None
    except ClientDisconnect:
        raise InvalidRequest("the client went away before its request had arrived") from None
    if not reader.is_complete:
        raise InvalidRequest("the body is no valid multipart/form-data: it ends before its last boundary")
    return reader.form


class _Reader:
    """Gathers what the parser finds."""

    def __init__(self, file_field: str, options_of: Callable[[bytes], tuple[bytes, dict[bytes, bytes]]]) -> None:
        self.form = Form()
        self.pending = bytearray()
        """Bytes of the file that nobody has taken yet."""
        self.is_complete = False
        self._file_field = file_field
        self._options_of = options_of
        self._header, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._name: str | None = None
        """Of the field that is being read; None: the file."""
        self._data = bytearray()
        self.callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header,
            "on_header_value": self._on_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._on_data,
            "on_part_end": self._end,
            "on_end": self._complete,
        }

    def _begin(self) -> None:
        self._disposition = b""
        self._data.clear()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        _, options = self._options_of(self._disposition)
        name = _text(options.get(b"name", b""), "the name of a field")
        if not name:
            raise InvalidRequest("a part of the form has no name")
        if name == self._file_field:
            if self.form.filename is not None:
                raise InvalidRequest(f"there is more than one {name}", param=name)
            self._name = None
            self.form.filename = _text(options.get(b"filename", b""), "the name of the file")
        else:
            if len(self.form.fields) >= MAX_FIELDS:
                raise InvalidRequest(f"the form has more than {MAX_FIELDS} fields")
            self._name = name

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            self.pending += data[start:end]
            return
        self._data += data[start:end]
        if len(self._data) > MAX_FIELD:
            raise InvalidRequest(f"{self._name} is longer than {MAX_FIELD} bytes", param=self._name)

    def _end(self) -> None:
        if self._name is not None:
            self.form.fields[self._name] = _text(bytes(self._data), self._name)

    def _complete(self) -> None:
        self.is_complete = True


def _text(data: bytes, what: str) -> str:
    if len(data) > MAX_FIELD:
        raise InvalidRequest(f"{what} is longer than {MAX_FIELD} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{what} is not UTF-8") from None
