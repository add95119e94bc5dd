"""Tests of tiers say what comes back, not how fast: nobody here gives up a disk because the machine is slow or quick.

A test of a disk that is too slow, or does not answer, sets its own limits.
"""

from __future__ import annotations

import pytest

import shoal.engine.kv.disk
import shoal.engine.kv.tiering

PATIENT_S = 60.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.engine.kv.tiering, "_WAIT_S", (PATIENT_S, PATIENT_S))
    monkeypatch.setattr(shoal.engine.kv.tiering, "_SCAN_S", PATIENT_S)
    monkeypatch.setattr(shoal.engine.kv.tiering, "_FLUSH_S", PATIENT_S)
    monkeypatch.setattr(shoal.engine.kv.disk, "_STALL_S", PATIENT_S)
