"""Lists that OpenAI's clients read page by page."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A part of a list."""

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def page(items: list[Any], limit: int) -> Page[Any]:
    """A page of up to `limit`, of items of which there may be one more."""
    data = items[:limit]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return Page(data=data, first_id=first, last_id=last, has_more=len(items) > limit)
