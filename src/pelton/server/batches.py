"""OpenAI's /v1/batches: many requests in a file, answered when nobody else needs the engine."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pelton.errors import NotFound
from pelton.server.batch_store import BatchStore
from pelton.server.batch_types import Batch, BatchQuery, BatchRequest
from pelton.server.context import current
from pelton.server.openai_account import check_metadata
from pelton.server.openai_pages import Page, page
from pelton.server.operation import Operation, get, post
from pelton.server.wire import JSON, read, read_query


def operations(batches: BatchStore | None, wake: Callable[[], None]) -> tuple[Operation, ...]:
    """The operations; `wake` is called when there is something to do for the runner. Without a store they say that
    there is none."""

    def there() -> BatchStore:
        if batches is None:
            raise NotFound("this server runs no batches: it was started without a store")
        return batches

    async def create(http: HTTPRequest) -> Response:
        body, unknown = await read(http, BatchRequest)
        current().refuse_ignored(sorted(unknown))
        check_metadata(body.metadata)
        batch = await there().create(body, current().key.id)
        wake()
        return JSON(batch)

    async def listing(http: HTTPRequest) -> Response:
        query, unknown = read_query(http, BatchQuery)
        current().refuse_ignored(unknown)
        found = there().some(current().key.id, limit=query.limit + 1, after=query.after)
        return JSON(page(found, query.limit))

    async def show(http: HTTPRequest) -> Response:
        return JSON(there().find(http.path_params["batch_id"], current().key.id))

    async def cancel(http: HTTPRequest) -> Response:
        batch = await there().cancel(http.path_params["batch_id"], current().key.id)
        wake()
        return JSON(batch)

    one = "/v1/batches/{batch_id}"
    return (
        post("/v1/batches", create, "Run a batch of requests", BatchRequest, Batch),
        get("/v1/batches", listing, "List the batches", Page[Batch], query=BatchQuery),
        get(one, show, "Show a batch", Batch),
        post(f"{one}/cancel", cancel, "Cancel a batch", answer=Batch),
    )
