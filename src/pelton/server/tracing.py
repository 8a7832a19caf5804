"""OpenTelemetry spans of requests, with the names of its conventions for generative AI. The home of opentelemetry,
which comes with `pip install pelton[otel]`.

Source: OpenTelemetry's semantic conventions for generative AI spans. Where spans go to and how many of them is what
OpenTelemetry's own variables say: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER and their like.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pelton import __version__
from pelton.errors import ConfigError
from pelton.request import Request, Usage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

SAMPLING = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
"""Attributes of sampling parameters."""


class Tracer:
    """Makes spans. They are sent by a thread of OpenTelemetry's own."""

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        """`processor`: what spans are handed to; None: a batch exporter that speaks OTLP over HTTP. Raises
        `ConfigError` where OpenTelemetry is not installed."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if processor is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                processor = BatchSpanProcessor(OTLPSpanExporter())
        except ImportError as error:
            raise ConfigError(f"traces need `pip install 'pelton[otel]'`: {error}", param="otel") from None
        resource = Resource.create({"service.name": "pelton", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pelton", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def start(self, request: Request, model: str, parent: dict[str, str]) -> Trace:
        """A request begins. `parent`: the caller's W3C trace headers."""
        from opentelemetry.trace import SpanKind

        if request.embedding is not None:
            operation = "embeddings"
        else:
            operation = "chat" if request.messages is not None else "text_completion"
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "pelton",
            "gen_ai.request.model": request.model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": request.id,
        }
        for field, name in () if request.embedding is not None else SAMPLING.items():
            if (value := getattr(request.sampling, field)) is not None:
                attributes[name] = value if isinstance(value, float) else min(value, (1 << 63) - 1)
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=self._propagator.extract(parent),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )
        return Trace(span)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class Trace:
    """The span of one request."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def first_token(self) -> None:
        """The first token has come."""
        self._span.add_event("gen_ai.first_token")

    def end(self, usage: Usage, reasons: set[str], *, failure: str | None = None) -> None:
        """The request has ended, its choices for these reasons. `failure`: what it ended in, where not well."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.response.finish_reasons": sorted(reasons),
            }
        )
        if failure is not None:
            self._span.set_attribute("error.type", failure)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
