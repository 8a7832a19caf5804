"""Log lines: one for each request, in both forms, without prompts unless they are asked for; and traces."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pelton import logs
from pelton.config import ServerConfig
from pelton.server import app
from pelton.server.listen import Server
from pelton.server.tracing import Tracer
from tests.server.scripted import ScriptedPool, ScriptedService, serving

SECRET = "the prompt is a secret"
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 1 << 70, "seed": 3}
PATH = "/v1/chat/completions"


@pytest.fixture(params=["text", "json"])
def lines(request) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JSONFormatter() if request.param == "json" else logs.TextFormatter())
    handler.addFilter(lambda record: record.name.startswith(("pelton", "uvicorn")))  # not the test's own client
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


def told(lines: io.StringIO) -> list[str]:
    return [line for line in lines.getvalue().splitlines() if "pelton." in line]


def test_a_line_for_each_request(lines):
    with serving(ScriptedService(), api_key="key-secret") as url:
        headers = {"x-request-id": "id-1", "x-api-key": "key-secret"}
        httpx.post(url + PATH + "?token=secret-2", json=CHAT, headers=headers)
        httpx.get(url + "/a%0Ab%22")
        httpx.get(url + "/health")
    first, second = told(lines)
    assert "secret" not in lines.getvalue()
    if first.startswith("{"):
        line = json.loads(first)
        assert (line["message"], line["request_id"]) == (f"POST {PATH} 200", "id-1")
        assert (line["key"], line["model"], line["prompt_tokens"]) == ("api-key", "scripted", 5)
        assert (line["level"], line["logger"]) == ("info", "pelton.access")
        assert 0 <= line["seconds"] < 10
        assert json.loads(second)["message"] == "GET /a%0Ab%22 401"
    else:
        assert f"INFO pelton.access: POST {PATH} 200 seconds=" in first
        assert first.endswith("key=api-key model=scripted prompt_tokens=5 cached_tokens=2 completion_tokens=3"
                              " request_id=id-1")  # fmt: skip
        assert "GET /a%0Ab%22 401" in second


def test_prompts_where_they_are_asked_for(lines):
    with serving(ScriptedService(), log_prompts=True) as url:
        httpx.post(url + PATH, json=CHAT)
        httpx.post(url + "/v1/completions", json={"model": "scripted", "prompt": "once upon"})
    assert SECRET in lines.getvalue()
    assert "once upon" in lines.getvalue()


def test_a_fault_has_its_requests_id_and_no_prompt(lines):
    service = ScriptedService()
    service.refuse = ValueError("broken")  # type: ignore[assignment]
    with serving(service) as url:
        assert httpx.post(url + PATH, json=CHAT, headers={"x-request-id": "id-9"}).status_code == 500
    assert SECRET not in lines.getvalue()
    [fault] = [line for line in lines.getvalue().splitlines() if "failed inside the server" in line]
    assert "id-9" in fault
    assert "ValueError: broken" in lines.getvalue()


@pytest.mark.parametrize("stream", [False, True])
def test_traces(monkeypatch, stream):
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(app, "Tracer", lambda: Tracer(SimpleSpanProcessor(exporter)))
    service = ScriptedService()
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with serving(service, otel=True) as url:
        parent = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        httpx.post(url + PATH, json={**CHAT, "stream": stream}, headers=parent)
        service.fail_after = 1
        httpx.post(url + "/v1/completions", json={"model": "scripted", "prompt": SECRET, "stream": stream})
        service.refuse = RuntimeError("no")  # type: ignore[assignment]
        httpx.post(url + PATH, json=CHAT)
        well, broken, refused = exporter.get_finished_spans()
    assert well.name == "chat scripted"
    assert f"{well.context.trace_id:032x}" == trace_id
    attributes = dict(well.attributes)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "scripted"
    assert attributes["gen_ai.request.seed"] == 3
    assert attributes["gen_ai.usage.input_tokens"] == 5
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert [event.name for event in well.events] == ["gen_ai.first_token"]
    assert well.status.is_ok or well.status.is_unset
    assert (broken.attributes["error.type"], broken.attributes["gen_ai.operation.name"]) == ("error", "text_completion")
    assert refused.attributes["error.type"] == "RuntimeError"
    assert not any(SECRET in str(span.to_json()) for span in (well, broken, refused))


def test_https(tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    pool = ScriptedPool(ScriptedService())
    config = ServerConfig(port=0, ssl_certfile=str(certificate), ssl_keyfile=str(key))
    server = Server(pool, config)  # type: ignore[arg-type]
    ports: list[int] = []
    is_ready = threading.Event()

    def ready(port: int) -> None:
        ports.append(port)
        is_ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(server.run(ready)))
    thread.start()
    try:
        assert is_ready.wait(30)
        context = ssl.create_default_context(cafile=str(certificate))
        url = f"https://127.0.0.1:{ports[0]}/health"
        assert httpx.get(url, verify=context).json() == {"status": "ok"}
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http"))
    finally:
        server._uvicorn.should_exit = True
        thread.join()
    assert pool.is_closed


def test_setup_writes_lines_of_the_form(capfd):
    before = logging.getLogger().handlers[:]
    try:
        logs.setup("json", logging.INFO)
        logging.getLogger("somebody").info("hello %s", "you")
        assert json.loads(capfd.readouterr().err)["message"] == "hello you"
        logs.setup("text", logging.WARNING)
        logging.getLogger("somebody").info("hidden")
        logging.getLogger("somebody").warning("seen")
        assert capfd.readouterr().err.endswith("WARNING somebody: seen\n")
    finally:
        logging.getLogger().handlers[:] = before


def test_a_client_that_goes_away_before_its_answer_is_no_bad_request(lines):
    service = ScriptedService(hang_after=1)
    with serving(service) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + PATH, json=CHAT, timeout=0.3)
        deadline = time.monotonic() + 10
        while not told(lines):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        scraped = httpx.get(url + "/metrics").text
    assert f"POST {PATH} 499" in told(lines)[0]
    assert f'pelton_http_requests_total{{method="POST",route="{PATH}",status="499"}} 1.0' in scraped
