"""What a monitoring system is told, in Prometheus' text format.

Owns: the names and meanings of all metrics, in a registry of this daemon's own. Counts that the database has anyway are
read from it when somebody asks, so that a restart does not set them back. Never does: HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._info = Gauge(
            "forkyard_info", "The daemon: its version and accelerator.", ["version", "accel"], registry=self._registry
        )
        self._sandboxes = Gauge(
            "forkyard_sandboxes", "Sandboxes in each state, deleted ones included.", ["state"], registry=self._registry
        )
        self._totals = _Totals()
        self._registry.register(self._totals)
        self.execs = Counter("forkyard_execs", "Commands started since this daemon runs.", registry=self._registry)
        self.previews = Counter(
            "forkyard_preview_requests",
            "Requests to previews since this daemon runs, by what became of them.",
            ["outcome"],
            registry=self._registry,
        )
        self.preview_seconds = Histogram(
            "forkyard_preview_seconds",
            "Time to the first byte of the answer of a preview.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=self._registry,
        )

    def text(
        self, *, version: str, accel: str, sandboxes: Mapping[str, int], totals: Mapping[str, tuple[str, int]]
    ) -> bytes:
        """`totals`: by name without prefix and `_total`, what it is and how much."""
        self._info.labels(version, accel).set(1)
        for state, count in sandboxes.items():
            self._sandboxes.labels(state).set(count)
        self._totals.values = dict(totals)
        return generate_latest(self._registry)


class _Totals(Collector):
    """Counters whose values come from elsewhere."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[str, int]] = {}

    def collect(self) -> Iterable[Metric]:
        for name, (help_text, value) in self.values.items():
            yield CounterMetricFamily(f"forkyard_{name}", help_text, value=value)
