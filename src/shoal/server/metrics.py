"""Counters and gauges for Prometheus. One registry per application: two servers in a process do not mix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.processes import process_mb
from shoal.types import FinishReason, Result, TierStats

if TYPE_CHECKING:
    from shoal.power.governor import Governor
    from shoal.server.hub import ModelHub

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """What the server has done, and what its engine holds now."""

    def __init__(self, hub: ModelHub) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "shoal_http_requests", "Calls by route and status.", ["path", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "shoal_http_request_seconds", "Time of a call.", ["path"], buckets=_SECONDS, registry=self.registry
        )
        self._ended = Counter("shoal_generations", "Generations by how they ended.", ["reason"], registry=self.registry)
        self._prompt = Counter("shoal_prompt_tokens", "Prompt tokens of generations.", registry=self.registry)
        self._cached = Counter(
            "shoal_cached_tokens", "Prompt tokens taken from the prefix tree.", registry=self.registry
        )
        self._restored = Counter(
            "shoal_restored_tokens", "Cached tokens that came back from a tier.", ["tier"], registry=self.registry
        )
        self._output = Counter("shoal_output_tokens", "Tokens written.", registry=self.registry)
        self._ttft = Histogram(
            "shoal_time_to_first_token_seconds", "From submission.", buckets=_SECONDS, registry=self.registry
        )
        self._latency = Histogram(
            "shoal_generation_seconds", "From submission to the end.", buckets=_SECONDS, registry=self.registry
        )
        self.registry.register(_EngineGauges(hub))

    def count_call(self, path: str, status: int, seconds: float) -> None:
        """Note a call that has ended."""
        self._calls.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def count_generation(self, result: Result) -> None:
        """Note a generation that has ended."""
        self._ended.labels(str(result.finish_reason)).inc()
        self._prompt.inc(result.prompt_tokens)
        self._cached.inc(result.cached_tokens)
        self._restored.labels("host").inc(result.receipt.host_tokens)
        self._restored.labels("disk").inc(result.receipt.disk_tokens)
        self._output.inc(len(result.tokens))
        self._latency.observe(result.latency_s)
        if result.ttft_s is not None:
            self._ttft.observe(result.ttft_s)

    def count_aborted(self, count: int) -> None:
        """Note generations that were ended because their client went away."""
        self._ended.labels(str(FinishReason.ABORTED)).inc(count)

    def page(self) -> bytes:
        """What a scraper reads."""
        return generate_latest(self.registry)


class _EngineGauges(Collector):
    """The engine's own numbers, read when a scraper asks."""

    def __init__(self, hub: ModelHub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        """Gauges of now, counters since the model was loaded."""
        healthy, _ = self._hub.health()
        yield GaugeMetricFamily("shoal_up", "1 when requests can be served.", value=float(healthy))
        yield GaugeMetricFamily("shoal_process_memory_bytes", "Resident memory.", value=process_mb() * 1e6)
        served = self._hub.served
        if served is None:
            return
        yield from _power(served.engine.governor)
        if served.engine.memory is not None:
            level = float(served.engine.memory.level)
            yield GaugeMetricFamily("shoal_memory_level", "0 is enough, 3 is out of memory.", value=level)
        stats = served.engine.stats()
        for name in ("waiting", "running", "kv_bytes", "kv_held_bytes", "kv_cached_bytes", "weight_bytes"):
            yield GaugeMetricFamily(f"shoal_{name}", f"Engine: {name}.", value=float(getattr(stats, name)))
        yield from _tiers(stats.tiers)
        for name in ("steps", "preemptions", "evictions", "drafted_tokens", "accepted_tokens"):
            yield CounterMetricFamily(f"shoal_{name}", f"Engine: {name}.", value=float(getattr(stats, name)))


_TIER_GAUGES = ("host_blocks", "host_bytes", "disk_blocks", "disk_queued_bytes")
_TIER_COUNTERS = (
    "disk_written_bytes",
    "disk_read_bytes",
    "restored_host_blocks",
    "restored_disk_blocks",
    "dropped_blocks",
    "given_up",
)


def _tiers(stats: TierStats | None) -> Iterator[Metric]:
    """What KV outside the device is there, and what went through it, where there is any."""
    if stats is None:
        return
    fault = float(stats.disk_fault is not None)
    yield GaugeMetricFamily("shoal_kv_disk_fault", "1 while the disk is left alone.", value=fault)
    for name in _TIER_GAUGES:
        value = float(getattr(stats, name))
        yield GaugeMetricFamily(f"shoal_kv_{name}", f"KV outside the device: {name}.", value=value)
    for name in _TIER_COUNTERS:
        value = float(getattr(stats, name))
        yield CounterMetricFamily(f"shoal_kv_{name}", f"KV outside the device: {name}.", value=value)


def _power(governor: Governor | None) -> Iterator[Metric]:
    """What the governor reads and does, where there is one."""
    if governor is None:
        return
    state = governor.describe()
    levels = GaugeMetricFamily("shoal_power_level", "1 for the level the machine is at.", labels=["level"])
    levels.add_metric([state["level"]], 1.0)
    yield levels
    cause = GaugeMetricFamily("shoal_power_cause", "1 for the sensor behind a level above nominal.", labels=["sensor"])
    if state["sensor"]:
        cause.add_metric([state["sensor"]], 1.0)
    yield cause
    yield GaugeMetricFamily("shoal_power_duty", "Share of the time that the engine works.", value=state["duty"])
    for name in ("deferring", "refusing"):
        yield GaugeMetricFamily(f"shoal_power_{name}", f"1 while the governor is {name}.", value=float(state[name]))
    readings = GaugeMetricFamily("shoal_power_reading", "What a sensor says.", labels=["sensor", "unit"])
    for reading in state["readings"]:
        readings.add_metric([str(reading["sensor"]), str(reading["unit"])], float(reading["value"]))
    yield readings
