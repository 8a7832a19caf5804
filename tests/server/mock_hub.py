"""A small Hugging Face Hub on loopback that can be told to misbehave."""

import hashlib
import json
import ssl
import threading
import time
from contextlib import contextmanager, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


class MockHub:
    """Serves `files` (path -> bytes) of any repository. What clients asked for stands in `requests`."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, Message]] = []
        self.sent = 0
        self.drops: list[int] = []  # bytes after which the next answers' connections are cut
        self.faults: list[int] = []  # the next answers' statuses
        self.corrupt = False
        self.surplus = b""
        self.silent = False
        self.ignore_range = False
        self.etag: str | None = None
        self.delay = 0.0  # seconds per 64 KiB
        self.redirect: str | None = None
        self.url = ""

    def gets(self, path: str = "/resolve/") -> list[Message]:
        """Headers of the GET requests for a file."""
        return [headers for method, where, headers in self.requests if method == "GET" and path in where]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: MockHub

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer("HEAD")

    def do_GET(self):
        self.answer("GET")

    def answer(self, method: str):
        hub = self.hub
        hub.requests.append((method, self.path, self.headers))
        while hub.silent:
            time.sleep(0.05)
        if hub.faults:
            self.plain(hub.faults.pop(0), b"", {"Retry-After": "0"})
            return
        if self.path.startswith("/api/models/"):
            self.listing()
            return
        name = self.path.partition("/resolve/")[2].partition("/")[2]
        if name not in hub.files:
            self.plain(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = hub.files[name]
        digest = hub.etag or hashlib.sha256(data).hexdigest()
        linked = {"X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        if hub.redirect:
            self.plain(302, b"", linked | {"Location": hub.redirect + self.path})
        elif method == "HEAD":
            self.send_response(200)
            for key, value in (linked | {"Content-Length": str(len(data)), "ETag": f'"{digest}"'}).items():
                self.send_header(key, value)
            self.end_headers()
        else:
            self.content((bytes([data[0] ^ 1]) + data[1:] if hub.corrupt else data) + hub.surplus)

    def plain(self, status: int, body: bytes, headers: dict[str, str]):
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def listing(self):
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130},
            }
            for name, data in self.hub.files.items()
        ]
        body = json.dumps({"id": "owner/repo", "sha": COMMIT, "siblings": siblings}).encode()
        self.plain(200, body, {"Content-Type": "application/json"})

    def content(self, data: bytes):
        hub = self.hub
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and not hub.ignore_range else 0
        if start and start >= len(data):
            self.plain(416, b"", {})
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = min(len(data), start + (hub.drops.pop(0) if hub.drops else len(data)))
        with suppress(OSError):
            for position in range(start, end, 65536):
                piece = data[position : min(position + 65536, end)]
                self.wfile.write(piece)
                hub.sent += len(piece)
                time.sleep(hub.delay)
        self.close_connection = True


@contextmanager
def running(handler: type[Handler] = Handler, hub: MockHub | None = None, tls: ssl.SSLContext | None = None):
    """A mock hub that is served while the block runs."""
    hub = hub or MockHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (handler,), {"hub": hub}))
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.silent = False
        server.shutdown()
        thread.join()
        server.server_close()
