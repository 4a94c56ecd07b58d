"""Client of an OpenTelemetry collector over HTTP; the only module that imports OpenTelemetry.

Used by `tracing.py`. Spans are made of what has ended, with ids of ours: the SDK's own tracer would
draw them. Headers, certificates, compression and the deadline of a request (10 s) are those of the
variables `OTEL_EXPORTER_OTLP_*`; `OTEL_RESOURCE_ATTRIBUTES` are added to the process's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from .traces import Span, SpanAddress

PATH = "/v1/traces"
MAX_REASON = 300  # characters
SCOPE = InstrumentationScope("nyala.episodes")


class OtlpCollector:
    """The OpenTelemetry collector at an address.

    Args:
        endpoint: Address of the server, without a path to traces.
        resource: Description of this process, by OpenTelemetry's names.
    """

    def __init__(self, endpoint: str, resource: dict[str, str]) -> None:
        self._resource = Resource.create(dict(resource))
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(_FAILURE_REASON)
        self._exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + PATH)

    def send(self, spans: Sequence[Span]) -> str | None:
        """Send spans, with several tries; return why they were not taken, or None if they were."""
        _FAILURE_REASON.first = ""
        result = self._exporter.export([self._readable(span) for span in spans])
        if result is SpanExportResult.SUCCESS:
            return None
        return _FAILURE_REASON.first[:MAX_REASON] or "it has given no reason"

    def close(self) -> None:
        """Shut the exporter down; nothing is retried any more."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call] # of the SDK

    def _readable(self, span: Span) -> ReadableSpan:
        trace_id = span.address.trace_id
        parent = None if span.parent_id is None else SpanAddress(trace_id, span.parent_id)
        return ReadableSpan(
            name=str(span.name),
            context=_context(span.address),
            parent=None if parent is None else _context(parent),
            resource=self._resource,
            attributes={f"nyala.{name}": value for name, value in span.attributes.items()},
            links=[Link(_context(address)) for address in span.links],
            status=Status(StatusCode.ERROR if span.is_error else StatusCode.UNSET),
            start_time=span.began_ns,
            end_time=span.ended_ns,
            instrumentation_scope=SCOPE,
        )


class _FailureReason(logging.Filter):
    """Keeps the reason of a failure, which the exporter only logs, at each try."""

    first = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.first = self.first or record.getMessage().partition("\n")[0]
        return False


_FAILURE_REASON = _FailureReason()


def _context(address: SpanAddress) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(address.trace_id, address.span_id, is_remote=True, trace_flags=flags)
