"""OpenAI's /v1/files: what batches read and write, and whatever else a client keeps here."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, Response

from pelton.errors import InvalidRequest, NotFound
from pelton.server.context import current
from pelton.server.file_store import FileStore, no_file
from pelton.server.file_types import FileDeleted, FileForm, FileObject, FileQuery
from pelton.server.multipart import Form, read_form
from pelton.server.openai_pages import Page, page
from pelton.server.operation import Operation, get, post
from pelton.server.wire import JSON, read_query

FILE_FIELD = "file"


def operations(files: FileStore | None) -> tuple[Operation, ...]:
    """The operations; without a store they say that there is none."""

    def there() -> FileStore:
        if files is None:
            raise NotFound("this server keeps no files: it was started without a store")
        return files

    async def create(http: HTTPRequest) -> Response:
        async with there().upload(current().key.id) as upload:
            form = await read_form(http, FILE_FIELD, upload.take)
            told = _told(form)
            return JSON(await upload.keep(form.filename or "upload", told.purpose, _seconds(told)))

    async def listing(http: HTTPRequest) -> Response:
        query, unknown = read_query(http, FileQuery)
        current().refuse_ignored(unknown)
        found = there().some(
            current().key.id,
            query.purpose,
            limit=query.limit + 1,
            is_newest_first=query.order == "desc",
            after=query.after,
        )
        return JSON(page(found, query.limit))

    async def show(http: HTTPRequest) -> Response:
        return JSON(there().find(http.path_params["file_id"], current().key.id))

    async def content(http: HTTPRequest) -> Response:
        file = there().find(http.path_params["file_id"], current().key.id)
        path = there().path(file.id)
        if not path.is_file():
            raise no_file(file.id)
        return FileResponse(path, media_type="application/octet-stream", filename=file.filename)

    async def delete(http: HTTPRequest) -> Response:
        id = http.path_params["file_id"]
        await there().delete(id, current().key.id)
        return JSON(FileDeleted(id=id))

    one = "/v1/files/{file_id}"
    return (
        post("/v1/files", create, "Keep a file", answer=FileObject, form=FileForm, is_file=True),
        get("/v1/files", listing, "List the files", Page[FileObject], query=FileQuery),
        get(one, show, "Show a file", FileObject),
        get(f"{one}/content", content, "Read a file", streams=("application/octet-stream",)),
        Operation(method="DELETE", path=one, run=delete, summary="Delete a file", answer=FileDeleted),
    )


def _told(form: Form) -> FileForm:
    """The form's fields. Raises `InvalidRequest` that names the one that is wrong."""
    if form.filename is None:
        raise InvalidRequest("file is missing", param=FILE_FIELD)
    plain: dict[str, object] = {FILE_FIELD: ""}
    expires: dict[str, str] = {}
    ignored = []
    for name, value in form.fields.items():
        if name.startswith("expires_after[") and name.endswith("]"):
            expires[name[len("expires_after[") : -1]] = value
        elif name == "purpose":
            plain[name] = value
        else:
            ignored.append(name)
    current().refuse_ignored(sorted(ignored))
    if expires:
        plain["expires_after"] = expires
    try:
        return msgspec.convert(plain, FileForm, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`").split(".")[0] or ("purpose" if "purpose" in message else None)
        raise InvalidRequest(f"{path.rstrip('`') or 'form'}: {message}", param=param) from None


def _seconds(told: FileForm) -> int | None:
    return None if told.expires_after is None else told.expires_after.seconds
