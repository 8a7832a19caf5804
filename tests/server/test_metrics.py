"""/metrics: what is counted, under Pelton's names and vLLM's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pelton.engine.protocol import Counters
from pelton.errors import Overloaded
from pelton.request import TextFinish
from pelton.server.keys import KeyStore
from pelton.server.metrics import ENGINE_METRICS, VLLM, Metrics
from pelton.server.store import Store
from tests.server.scripted import ScriptedService, serving

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}
PATH = "/v1/chat/completions"
DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService(queued=0.125, prefill=0.0625, delay=0.3)


def scrape(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = httpx.get(url + "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(response.text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def of(samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


@pytest.mark.parametrize("stream", [False, True])
def test_what_requests_take(url, stream):
    for _ in range(2):
        httpx.post(url + PATH, json={**CHAT, "stream": stream})
    samples = scrape(url)
    model = {"model": "scripted"}
    assert of(samples, "pelton_http_requests_total", route=PATH, method="POST", status="200") == 2
    assert of(samples, "pelton_requests_total", finish="stop", **model) == 2
    assert of(samples, "pelton_prompt_tokens_total", **model) == 10
    assert of(samples, "pelton_cached_tokens_total", **model) == 4
    assert of(samples, "pelton_completion_tokens_total", **model) == 6
    assert of(samples, "pelton_time_to_first_token_seconds_count", **model) == 2
    assert 0.6 <= of(samples, "pelton_time_to_first_token_seconds_sum", **model) < 5
    assert of(samples, "pelton_inter_token_seconds_count", **model) == 4
    assert of(samples, "pelton_time_per_output_token_seconds_count", **model) == 2
    assert of(samples, "pelton_queue_seconds_sum", **model) == 0.25
    assert of(samples, "pelton_prefill_seconds_sum", **model) == 0.125  # as the engine has measured it
    assert of(samples, "pelton_request_seconds_sum", **model) >= of(
        samples, "pelton_time_to_first_token_seconds_sum", **model
    )
    names = ("prepare", "queue", "prefill", "decode", "request")
    *parts, whole = (of(samples, f"pelton_{name}_seconds_sum", **model) for name in names)
    assert sum(parts) == pytest.approx(whole)
    assert parts[0] >= 0.2
    vllm = {"model_name": "scripted", "engine": "0"}
    assert of(samples, "vllm:request_success_total", finished_reason="stop", **vllm) == 2
    assert of(samples, "vllm:generation_tokens_total", **vllm) == 6
    assert of(samples, "vllm:prefix_cache_queries_total", **vllm) == 10
    assert of(samples, "vllm:time_to_first_token_seconds_bucket", le="+Inf", **vllm) == 2
    assert of(samples, "vllm:e2e_request_latency_seconds_count", **vllm) == 2


def test_what_engines_tell(url, service):
    service.engine.counters = Counters(
        num_running=3, num_waiting=2, kv_blocks_used=25, kv_blocks_total=100, preempted=7, drafted=40, accepted=30
    )
    samples = scrape(url)
    assert of(samples, "pelton_running", model="scripted") == 3
    assert of(samples, "pelton_kv_usage_ratio", model="scripted") == 0.25
    vllm = {"model_name": "scripted", "engine": "0"}
    assert of(samples, "vllm:num_requests_running", **vllm) == 3
    assert of(samples, "vllm:num_requests_waiting", **vllm) == 2
    assert of(samples, "vllm:kv_cache_usage_perc", **vllm) == 0.25
    assert of(samples, "vllm:num_preemptions_total", **vllm) == 7
    assert of(samples, "vllm:spec_decode_num_draft_tokens_total", **vllm) == 40
    assert of(samples, "vllm:spec_decode_num_accepted_tokens_total", **vllm) == 30


def test_what_goes_wrong_is_counted_as_what_it_was(url, service):
    service.delay = 0
    service.fail_after = 1
    httpx.post(url + PATH, json=CHAT)
    service.fail_after, service.hang_after = None, 1
    with httpx.stream("POST", url + PATH, json={**CHAT, "stream": True}) as response:
        next(response.iter_lines())
    service.refuse = Overloaded("full")
    httpx.post(url + PATH, json=CHAT)
    httpx.get(url + "/" + "x" * 50)
    httpx.post(url + PATH, content=b"{")
    samples = scrape(url)
    assert of(samples, "pelton_requests_total", finish="error", model="scripted") == 1
    assert of(samples, "pelton_requests_total", finish="abort", model="scripted") == 1
    assert of(samples, "pelton_request_seconds_count", model="scripted") == 0
    statuses = {
        dict(labels)["status"]: value for (name, labels), value in samples.items()
        if name == "pelton_http_requests_total" and dict(labels)["route"] == PATH
    }  # fmt: skip
    assert statuses == {"500": 1, "200": 1, "429": 1, "400": 1}
    assert of(samples, "pelton_http_requests_total", route="none", method="GET", status="404") == 1


def test_how_choices_end(url, service, monkeypatch):
    async def events(request):
        yield TextFinish(choice=0, reason="length")
        yield TextFinish(choice=1, reason="stop")
        async for event in original(request):
            if not isinstance(event, TextFinish):
                yield event

    original = service._events
    monkeypatch.setattr(service, "_events", events)
    httpx.post(url + PATH, json={**CHAT, "n": 2})
    assert of(scrape(url), "pelton_requests_total", finish="length", model="scripted") == 1


def test_openmetrics_where_it_is_asked_for(url):
    response = httpx.get(url + "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_a_key_may_be_for_metrics_alone(service, tmp_path):
    store = Store(tmp_path / "s")
    keys = KeyStore(store)
    _, reader = keys.create("prometheus", scopes=["metrics"])
    _, user = keys.create("ada")
    with serving(service, store=str(tmp_path / "s")) as url:
        assert httpx.get(url + "/metrics", headers={"x-api-key": reader}).status_code == 200
        assert httpx.get(url + "/metrics", headers={"x-api-key": user}).status_code == 403
        assert httpx.post(url + PATH, json=CHAT, headers={"x-api-key": reader}).status_code == 403
    store.close()


def test_every_name_is_documented_and_the_board_asks_for_no_other():
    names = {metric.name for metric in Metrics(list).collect()}
    ours = {name for name in names if not name.startswith("vllm:")}
    assert {f"pelton_{name}" for name, *_ in ENGINE_METRICS} < ours
    assert set(VLLM) < ours
    text = (DOCS / "metrics.md").read_text()
    told = {re.sub(r"_(total|info)$", "", name) for name in re.findall(r"`((?:pelton_|vllm:)\w+)`", text)}
    assert told == names
    board = json.loads((DOCS / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    used = set(re.findall(r"pelton_\w+", " ".join(asked)))
    assert used
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in used} <= ours
