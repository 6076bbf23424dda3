"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..reply import Usage
from .worker import Worker

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """What is counted. Gauges are read from the worker when somebody looks."""

    def __init__(self, worker: Worker) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("lily_requests", "Answered requests.", ("endpoint", "status"), registry=self.registry)
        self._tokens = Counter("lily_tokens", "Tokens: prompt (cached ones included), cached, completion.", ("kind",), registry=self.registry)
        cancelled = Counter("lily_cancelled", "Generations whose client went away.", registry=self.registry)
        worker.on_cancelled = cancelled.inc
        self._first_token = Histogram("lily_first_token_seconds", "From the start of a generation to its first token.", buckets=_SECONDS, registry=self.registry)
        self._decode = Histogram("lily_decode_seconds", "From the first token of a generation to its last.", buckets=_SECONDS, registry=self.registry)
        Gauge("lily_waiting_requests", "Requests in the queue.", registry=self.registry).set_function(lambda: worker.waiting)
        Gauge("lily_running_requests", "Generations that run now.", registry=self.registry).set_function(lambda: worker.running)
        Gauge("lily_healthy", "1 while requests can be served.", registry=self.registry).set_function(lambda: worker.fault is None)

    def answered(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def generated(self, usage: Usage) -> None:
        for kind, count in (("prompt", usage.prompt_tokens), ("cached", usage.cached_tokens), ("completion", usage.completion_tokens)):
            self._tokens.labels(kind).inc(count)
        self._first_token.observe(usage.prefill_seconds)
        self._decode.observe(usage.decode_seconds)

    def page(self) -> bytes:
        return generate_latest(self.registry)
