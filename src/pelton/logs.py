"""How log lines look: as text, or as one JSON object each. Prompts are in none of them unless that was asked for."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Any, Literal

Format = Literal["text", "json"]

request_id: ContextVar[str] = ContextVar("pelton request id", default="")
"""Of the HTTP request on whose behalf this task runs."""


def setup(format: Format, level: int) -> None:
    """Write all log lines of this process to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells whole addresses, with the tokens in them


def fields(**values: Any) -> dict[str, Any]:
    """`extra` of a logging call: what its line tells beside the message."""
    return {"fields": values}


class TextFormatter(logging.Formatter):
    """Time, level, logger, message, and the request's id where there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line without its traceback."""
        line = super().formatMessage(record)
        told = getattr(record, "fields", {})
        line += "".join(f" {name}={_plain(value)}" for name, value in told.items() if value is not None)
        return f"{line} request_id={id}" if (id := request_id.get()) else line


def _plain(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


class JSONFormatter(logging.Formatter):
    """One line of JSON: time (RFC 3339, UTC), level, logger, message, request_id, the line's own fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if id := request_id.get():
            line["request_id"] = id
        line |= {name: value for name, value in getattr(record, "fields", {}).items() if value is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
