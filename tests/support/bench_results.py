"""A result document made by hand: two systems, all scenarios, figures that are easy to check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.bench.timeline import summary
from shoal.bench.workloads import SCENARIOS, Workload


def level(workload: Workload, walls: dict[str, list[float]]) -> dict[str, Any]:
    """One level: `walls` by contender; rates are 1,000 over the wall time, other times a tenth of it."""
    results = {}
    for key, values in walls.items():
        runs: list[dict[str, Any]] = [
            {
                "wall_s": wall,
                "tokens_per_s": 1000 / wall,
                "ttft_p50_s": wall / 10,
                "ttft_p95_s": wall / 10,
                "itl_p50_s": wall / 10,
                "itl_p95_s": wall / 10,
                "worst_gap_s": wall / 10,
                "decode_tokens_per_s": 1000 / wall,
                "prefill_tokens_per_s": 1000 / wall,
                "hit_rate": 0.5,
                "computed_tokens": 100,
                "throttled": False,
            }
            for wall in values
        ]
        names = [name for name in runs[0] if name != "throttled"] if runs else []
        results[key] = {
            "runs": runs,
            "throttled": 0,
            "summary": {name: summary([run[name] for run in runs]) for name in names},
            "spans": [[0.0, wall / 2, wall] for wall in values[:1]],
        }
    best = {"decode_tokens_per_s": 2000.0, "prefill_tokens_per_s": 4000.0, "wall_s": 0.1}
    return {
        "scenario": workload.scenario,
        "level": workload.level,
        "workload": workload.to_json(),
        "ceiling": best,
        "results": results,
        "equality": {key: {"equal": 1, "of": 2, "common_tokens": 3.5} for key in list(walls)[1:]},
    }


def document(scale: float = 1.0) -> dict[str, Any]:
    """A result in which shoal takes 1 s, times `scale`, and llama.cpp 4 s for everything."""
    levels = []
    for workload in [workload for group in SCENARIOS.values() for workload in group]:
        walls = {"shoal": [scale * v for v in (0.99, 1.0, 1.01)]}
        if workload.peers:
            walls["llama"] = [3.9, 4.0, 4.1]
        for variant in workload.variants:
            if variant in ("unshared", "static"):
                walls[f"shoal:{variant}"] = [2.0, 2.0, 2.0]
            if variant in ("graph", "independent", "serial"):
                walls[f"shoal-agents:{variant}"] = [2.0, 2.0, 2.0]
        if "http" in workload.variants:
            walls["shoal-http:http"] = [1.25, 1.25, 1.25]
        levels.append(level(workload, walls))
    system = {"file": "m.gguf", "configuration": {"threads": 2}, "fidelity": {"mean_kl": 0.0027, "top1": 0.96}}
    cold = {"load_s": 1.0, "first_run_s": 0.5, "warm_run_s": 0.1}
    return {
        "schema": 1,
        "when": "2026-01-02T03:04:05+00:00",
        "command": "shoal bench --scenario all",
        "quick": False,
        "took_s": 600.0,
        "machine": {
            "cpu": "A CPU",
            "cores": 4,
            "threads": 2,
            "features": ["avx2"],
            "memory_bytes": 1 << 34,
            "system": "Linux",
            "load": 0.1,
            "read_bytes_per_s": 30e9,
            "gemm_f32_ops_per_s": 200e9,
            "gemm_bf16_ops_per_s": None,
            "int8_ops_per_s": 800e9,
        },
        "model": {"name": "m", "file": "m.gguf", "bytes": 1, "sha256": "ab"},
        "gate": {"baseline_ms": 1.0, "margin": 0.15, "waits": 2, "waited_s": 3.0},
        "systems": {
            "shoal": {"label": "shoal", **system, "cold": cold},
            "shoal-http": {"label": "shoal, over HTTP", "file": "m.gguf", "fidelity": {"missing": "no logits"}},
            "shoal-agents": {"label": "shoal", "file": "m.gguf", "fidelity": {"missing": "no logits"}},
            "llama": {"label": "llama.cpp, same file", **system, "cold": cold},
        },
        "missing": {"genai": "openvino-genai is not installed"},
        "levels": levels,
    }


def write(path: Path, told: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told), "utf-8")
    return path
