"""OpenAI's wire types of files. Source: OpenAI's API reference (files)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
"""What clients may say that a file is for."""
MIN_LIFE, MAX_LIFE = 3600, 30 * 24 * 3600
"""Seconds after which a file may end."""


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True):
    """When a file ends: so many seconds after it was made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=MIN_LIFE, le=MAX_LIFE)]


class FileForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form of POST /v1/files. `expires_after` comes as two fields."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file. Times are seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    object: str = "file"
    status: str = "processed"


class FileQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of GET /v1/files."""

    purpose: Annotated[str, msgspec.Meta(max_length=100)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    after: Annotated[str, msgspec.Meta(max_length=100)] | None = None


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """A file has gone."""

    id: str
    object: str = "file"
    deleted: bool = True
