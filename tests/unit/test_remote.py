from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from pelton.cli import remote


def test_a_key_does_not_follow_a_redirect(capsys):
    seen = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers.get("authorization")))
            self.send_response(302 if self.path == "/pelton/models" else 200)
            self.send_header("location", f"http://localhost:{self.server.server_port}/elsewhere")
            self.end_headers()
            if self.path != "/pelton/models":
                self.wfile.write(json.dumps({"data": []}).encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        remote.ps(True, url=f"http://127.0.0.1:{server.server_port}", api_key="secret")
        server.shutdown()
        thread.join()
    assert json.loads(capsys.readouterr().out) == {"data": []}
    assert seen == [("/pelton/models", "Bearer secret"), ("/elsewhere", None)]
