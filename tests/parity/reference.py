"""The exact answer that runners are measured against; it lives with the benchmarks, which need it installed."""

from __future__ import annotations

from shoal.bench.reference import logits, mean_kl

__all__ = ["logits", "mean_kl"]
