"""Prometheus metrics: what requests took, counted here, and what engines tell of themselves, read when somebody asks.

Each has a name of Pelton's own, and one of vLLM's where that has the same meaning, so that boards made for vLLM work.
docs/metrics.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from pelton import __version__
from pelton.request import TextDone, Usage

if TYPE_CHECKING:
    from pelton.engine.protocol import Counters
    from pelton.service import Service

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0,
)  # fmt: skip
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
TOKENS = tuple(float(1 << i) for i in range(0, 19))

VLLM = {
    "pelton_requests": ("vllm:request_success",),
    "pelton_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "pelton_inter_token_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "pelton_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "pelton_request_seconds": ("vllm:e2e_request_latency_seconds",),
    "pelton_queue_seconds": ("vllm:request_queue_time_seconds",),
    "pelton_prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "pelton_decode_seconds": ("vllm:request_decode_time_seconds",),
    "pelton_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "pelton_request_completion_tokens": ("vllm:request_generation_tokens",),
    "pelton_prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "pelton_cached_tokens": ("vllm:prefix_cache_hits",),
    "pelton_completion_tokens": ("vllm:generation_tokens",),
    "pelton_running": ("vllm:num_requests_running",),
    "pelton_waiting": ("vllm:num_requests_waiting",),
    "pelton_kv_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "pelton_preempted": ("vllm:num_preemptions",),
    "pelton_drafted_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "pelton_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
}
"""Our names, and vLLM's for the same thing: its current one, and an older one where boards have that."""
VLLM_LABELS = {"model": "model_name", "finish": "finished_reason"}


def _kv_usage(counters: Counters) -> float:
    return counters.kv_blocks_used / max(1, counters.kv_blocks_total)


class Metrics:
    """All metrics of one server."""

    def __init__(self, services: Callable[[], Iterable[Service]]) -> None:
        """`services`: those of the models that are loaded now."""
        self._registry = CollectorRegistry()
        self._services = services
        Info("pelton_build", "Which Pelton this is.", registry=self._registry).info({"version": __version__})
        self.http = Counter(
            "pelton_http_requests", "HTTP requests, by their route as declared.", ("route", "method", "status"),
            registry=self._registry,
        )  # fmt: skip
        self.requests = self._counter("requests", "Generations that have ended, by how.", "finish")
        self.prompt = self._counter("prompt_tokens", "Tokens of prompts, those from the prefix cache included.")
        self.cached = self._counter("cached_tokens", "Of them, the ones from the prefix cache.")
        self.completion = self._counter("completion_tokens", "Tokens of answers.")
        self.first = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.between = self._histogram("inter_token_seconds", "Between two pieces of a choice.", BETWEEN)
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "A request's time after its first token, per further token.", BETWEEN
        )
        self.whole = self._histogram("request_seconds", "From a request's arrival to its end.")
        self.prepare = self._histogram(
            "prepare_seconds",
            "From a request's arrival to the engine's taking it: its model's load, its prompt's rendering.",
        )
        self.queue = self._histogram("queue_seconds", "From the engine's taking a request to its first step.")
        self.prefill = self._histogram("prefill_seconds", "From a request's first step to its first token.")
        self.decode = self._histogram("decode_seconds", "From a request's first token to its end.")
        self.prompts = self._histogram("request_prompt_tokens", "Tokens of a request's prompt.", TOKENS)
        self.answers = self._histogram("request_completion_tokens", "Tokens of a request's choices.", TOKENS)
        self._batch_requests = Counter(
            "pelton_batch_requests", "Requests of batches that are done, by how.", ("outcome",),
            registry=self._registry,
        )  # fmt: skip
        self.count_batches: Callable[[], dict[str, int]] = dict
        """The batches of the store, by status."""
        self._of: dict[str, ModelMetrics] = {}

    def count_batch_request(self, is_failed: bool) -> None:
        """A request of a batch is done."""
        self._batch_requests.labels("failed" if is_failed else "completed").inc()

    def _batches(self) -> Metric:
        metric = GaugeMetricFamily("pelton_batches", "Batches, by their status.", labels=("status",))
        for status, count in sorted(self.count_batches().items()):
            metric.add_metric((status,), count)
        return metric

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"pelton_{name}", help, ("model", *labels), registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"pelton_{name}", help, ("model",), buckets=buckets, registry=self._registry)

    def of(self, model: str) -> ModelMetrics:
        """Those of one model's requests."""
        found = self._of.get(model)
        if found is None:
            found = self._of[model] = ModelMetrics(self, model)
        return found

    def expose(self, accept: str, sees: Callable[[str], bool]) -> tuple[bytes, str]:
        """Those of no model and of models that are seen, in the form that an Accept header asks for, and its media
        type."""
        encode, media_type = choose_encoder(accept)
        return encode(_Seen(self, sees)), media_type

    def collect(self) -> Iterator[Metric]:
        """All metrics as they stand, under both names (what Prometheus' encoders ask for)."""
        for metric in (*self._registry.collect(), self._batches(), *engine_metrics(self._services())):
            yield metric
            for alias in VLLM.get(metric.name, ()):
                yield _renamed(metric, alias)


class _Seen:
    """Metrics without those of models that somebody does not see, as Prometheus' encoders ask for them."""

    def __init__(self, metrics: Metrics, sees: Callable[[str], bool]) -> None:
        self._metrics, self._sees = metrics, sees

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics.collect():
            seen = [each for each in metric.samples if self._sees_labels(each.labels)]
            if len(seen) < len(metric.samples):
                metric.samples = seen
            yield metric

    def _sees_labels(self, labels: Mapping[str, str]) -> bool:
        model = labels.get("model", labels.get("model_name"))
        return model is None or self._sees(model)


class ModelMetrics:
    """The metrics of one model's requests, found once and not for each token."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        self.completion = metrics.completion.labels(model)
        self.first = metrics.first.labels(model)
        self.between = metrics.between.labels(model)
        self._prompt = metrics.prompt.labels(model)
        self._cached = metrics.cached.labels(model)
        self._per_token = metrics.per_token.labels(model)
        self._whole = metrics.whole.labels(model)
        self._prepare = metrics.prepare.labels(model)
        self._queue = metrics.queue.labels(model)
        self._prefill = metrics.prefill.labels(model)
        self._decode = metrics.decode.labels(model)
        self._prompts = metrics.prompts.labels(model)
        self._answers = metrics.answers.labels(model)

    def finished(self, reason: str) -> None:
        """A request has ended: stop, length, tool_calls, abort or error."""
        self._metrics.requests.labels(self._model, reason).inc()

    def done(self, usage: Usage) -> None:
        """A request has ended well."""
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._prompts.observe(usage.prompt_tokens)
        self._answers.observe(usage.completion_tokens)

    def took(self, done: TextDone, *, seconds: float, to_first: float | None) -> None:
        """It took so many seconds; `to_first` of them had gone when its first token came."""
        self._whole.observe(seconds)
        self._queue.observe(done.queued)
        if to_first is not None:
            self._prepare.observe(max(0.0, to_first - done.queued - done.prefill))
            self._prefill.observe(done.prefill)
            self._decode.observe(seconds - to_first)
            if done.usage.completion_tokens > 1:
                self._per_token.observe((seconds - to_first) / (done.usage.completion_tokens - 1))


ENGINE_METRICS: tuple[
    tuple[str, type[GaugeMetricFamily | CounterMetricFamily], str, Callable[[Counters], float]], ...
] = (
    ("running", GaugeMetricFamily, "Sequences that run.", lambda c: c.num_running),
    ("waiting", GaugeMetricFamily, "Sequences that wait.", lambda c: c.num_waiting),
    (
        "kv_usage_ratio",
        GaugeMetricFamily,
        "Share of KV memory that sequences hold; what is merely cached is not in it.",
        _kv_usage,
    ),
    ("kv_blocks", GaugeMetricFamily, "Blocks of KV memory.", lambda c: c.kv_blocks_total),
    ("pins", GaugeMetricFamily, "Prompts that are pinned in KV memory.", lambda c: len(c.pins)),
    ("steps", CounterMetricFamily, "Steps since the engine was started.", lambda c: c.steps),
    ("preempted", CounterMetricFamily, "Sequences that gave their memory to others.", lambda c: c.preempted),
    ("swapped", CounterMetricFamily, "Of them, the ones copied to host memory.", lambda c: c.swapped),
    ("drafted_tokens", CounterMetricFamily, "Tokens tried out as drafts.", lambda c: c.drafted),
    ("accepted_tokens", CounterMetricFamily, "Of them, the ones that the model drew itself.", lambda c: c.accepted),
    ("prefix_disk_read_bytes", CounterMetricFamily, "Of cached prefixes.", lambda c: c.disk_bytes_read),
    ("prefix_disk_written_bytes", CounterMetricFamily, "Of cached prefixes.", lambda c: c.disk_bytes_written),
)
"""What each loaded model's engine tells of itself with its steps."""


def engine_metrics(services: Iterable[Service]) -> list[Metric]:
    """What engines tell of themselves, as metrics."""
    counters = [(service.name, service.engine.counters) for service in services]
    metrics: list[Metric] = []
    for name, kind, help, value in ENGINE_METRICS:
        metric = kind(f"pelton_{name}", help, labels=("model",))
        for model, each in counters:
            metric.add_metric((model,), value(each))
        metrics.append(metric)
    return metrics


def _renamed(metric: Metric, name: str) -> Metric:
    alias = Metric(name, metric.documentation, metric.type, metric.unit)
    for sample in metric.samples:
        labels = {VLLM_LABELS.get(label, label): value for label, value in sample.labels.items()}
        suffix = sample.name.removeprefix(metric.name)
        alias.samples.append(Sample(name + suffix, {**labels, "engine": "0"}, sample.value, sample.timestamp))
    return alias
