"""/openapi.json: complete, and true of what the server does."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.config import SchemathesisConfig

from pelton.config import ServerConfig
from pelton.server.app import App
from tests.server.scripted import ScriptedPool, ScriptedService, serving

load_all_checks()
HELD = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    with serving(ScriptedService(), store=str(tmp_path_factory.mktemp("home") / "server.sqlite")) as address:
        yield address


def test_it_has_every_operation():
    app = App(ScriptedPool(ScriptedService()), ServerConfig())  # type: ignore[arg-type]
    with serving(ScriptedService()) as url:
        document = httpx.get(url + "/openapi.json").json()
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    declared = {(each.method, each.path.replace(":path}", "}")) for each in app.operations if each.is_offered}
    assert told == declared
    assert len({each["operationId"] for methods in document["paths"].values() for each in methods.values()}) == len(
        told
    )
    assert document["paths"]["/health"]["get"]["security"] == []
    assert {"ChatRequest", "ErrorAnswer"} <= set(document["components"]["schemas"])


def test_whatever_is_sent_is_answered_as_described(url):
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=SchemathesisConfig())
    checks = [check for check in CHECKS.get_all() if check.__name__ in HELD]
    assert len(checks) == len(HELD)
    seen: set[int] = set()

    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(case=operation.as_strategy())
        def answers(case) -> None:
            response = case.call(timeout=20)
            seen.add(response.status_code)
            case.validate_response(response, checks=checks)

        answers()
    assert 200 in seen
    assert 400 in seen
