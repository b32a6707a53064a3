"""The gateway's numbers for Prometheus. The registry is handed in, so that several can live in one process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rollyard.schemas.call import CallEnd

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """One set of metrics. Names are public API: dashboards and alarms rely on them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.calls = Counter(
            "rollyard_gateway_calls_total", "Calls that ended, by status.", ["status"], registry=registry
        )
        self.refusals = Counter(
            "rollyard_gateway_refusals_total", "Requests refused, by error code.", ["code"], registry=registry
        )
        self.tokens = Counter(
            "rollyard_gateway_tokens_total",
            "Tokens of ended calls: prompt and completion.",
            ["kind"],
            registry=registry,
        )
        self.untrainable = Counter(
            "rollyard_gateway_untrainable_total", "Calls whose ids cannot be trained on.", registry=registry
        )
        self.drift = Counter(
            "rollyard_gateway_drift_total",
            "Calls that did not continue their parent's ids.",
            ["reason"],
            registry=registry,
        )
        self.catch_ups = Counter(
            "rollyard_gateway_catch_ups_total", "Times a session was caught up from the log.", registry=registry
        )
        self.joined = Counter(
            "rollyard_gateway_joined_total", "Requests that joined an equal call in flight.", registry=registry
        )
        self.canonical = Gauge(
            "rollyard_gateway_canonical_messages",
            "Messages that each rule of comparison changed.",
            ["rule"],
            registry=registry,
        )
        self.in_flight = Gauge("rollyard_gateway_calls_in_flight", "Calls that are running.", registry=registry)
        self.owed = Gauge("rollyard_gateway_ends_owed", "Ends of calls not yet in the log.", registry=registry)
        self.log_fill = Gauge(
            "rollyard_gateway_log_fill_ratio", "How full the LOG stream is, 0 to 1.", registry=registry
        )
        self.first_token = Histogram(
            "rollyard_gateway_first_token_seconds", "Request to first token.", buckets=_SECONDS, registry=registry
        )
        self.duration = Histogram(
            "rollyard_gateway_call_seconds", "Request to end of call.", buckets=_SECONDS, registry=registry
        )

    def count(self, end: CallEnd) -> None:
        """Take a call that ended."""
        self.calls.labels(end.status).inc()
        self.tokens.labels("prompt").inc(end.usage.prompt_tokens)
        self.tokens.labels("completion").inc(end.usage.completion_tokens)
        self.duration.observe(end.timings.total_s or 0.0)
        if end.timings.first_token_s is not None:
            self.first_token.observe(end.timings.first_token_s)
        if end.untrainable is not None:
            self.untrainable.inc()
