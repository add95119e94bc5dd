"""The store as the page shows it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.engine.engine import Engine
from shoal.models import Store
from tests.support.live import Live, error_of, toy
from tests.support.tiny_gguf import write_tiny


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    for name, size in (("one", 3000), ("org--two", 5000)):
        directory = tmp_path / "models" / name
        directory.mkdir(parents=True)
        (directory / "model.gguf").write_bytes(b"x" * size)
        marker = {"name": name.replace("--", "/"), "kind": "gguf", "files": {"model.gguf": size}}
        (directory / "shoal-model.json").write_text(json.dumps(marker))
    return tmp_path


@pytest.fixture
def live(home: Path) -> Iterator[Live]:
    with Live(toy(), name="one") as server:
        yield server


def test_sizes_and_what_is_loaded(live: Live, home: Path) -> None:
    derived = Store().cache_dir(Store().resolve("org/two", pull=False).key)
    (derived / "packed").write_bytes(b"y" * 700)
    told = live.http.get("/swarmbench/storage").json()
    models = {model["name"]: model for model in told["models"]}
    assert set(models) == {"one", "org/two"}
    assert models["one"]["loaded"]
    assert not models["org/two"]["loaded"]
    assert models["org/two"]["bytes"] > 5000
    assert models["org/two"]["derived_bytes"] == 700
    assert models["one"]["weights"] is None  # no GGUF, whatever its name says
    assert told["free_bytes"] > 0
    assert told["history"] == {"runs": 0, "bytes": 0}


def test_a_model_is_deleted_but_not_the_one_in_use(live: Live, home: Path) -> None:
    answer = live.http.delete("/swarmbench/storage/one")
    assert (answer.status_code, error_of(answer)["code"]) == (409, "model_in_use")
    assert live.http.delete("/swarmbench/storage/org/two").json()["freed_bytes"] > 5000
    assert not (home / "models" / "org--two").exists()
    assert live.http.delete("/swarmbench/storage/org/two").status_code == 404
    assert live.http.delete("/swarmbench/storage/..%2f..").status_code == 404


def test_a_model_that_is_being_loaded_is_not_deleted(home: Path) -> None:
    loading, go = threading.Event(), threading.Event()

    def load(name: str) -> Engine:
        loading.set()
        go.wait(60)
        return toy()

    with Live(toy(), load, name="one") as server:
        switch = threading.Thread(target=lambda: server.post("/models/load", {"model": "org/two"}))
        switch.start()
        assert loading.wait(60)
        answer = server.http.delete("/swarmbench/storage/org/two")
        go.set()
        switch.join(60)
        assert (answer.status_code, error_of(answer)["code"]) == (409, "model_in_use")
    assert (home / "models" / "org--two").exists()


def test_a_pull_is_told_of_until_it_ends(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read from the environment once, at import
    assert live.post("/swarmbench/storage", {"name": "no such name!"}).status_code == 404
    assert live.post("/swarmbench/storage", {"name": "nobody/nothing"}).status_code == 200
    deadline = time.monotonic() + 60
    while not (pull := live.http.get("/swarmbench/storage").json()["pulls"][0])["finished"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert pull["stage"] == "failed"
    assert "nobody/nothing" in pull["error"]


def test_another_spelling_of_the_loaded_model_does_not_delete_it(home: Path) -> None:
    with Live(toy(), name="org/two") as live:
        for name in ("org/two", "org--two", "org:two", "ORG/Two"):
            answer = live.http.delete(f"/swarmbench/storage/{name}")
            assert answer.status_code in (404, 409), name
            assert (home / "models" / "org--two" / "model.gguf").exists(), name
        assert error_of(live.http.delete("/swarmbench/storage/org--two"))["code"] == "model_in_use"


def _until(live: Live, name: str, stages: tuple[str, ...]) -> dict[str, Any]:
    end = time.monotonic() + 30
    while True:
        pulls = {pull["name"]: pull for pull in live.http.get("/swarmbench/storage").json()["pulls"]}
        if name in pulls and pulls[name]["stage"] in stages:
            found: dict[str, Any] = pulls[name]
            return found
        assert time.monotonic() < end, pulls
        time.sleep(0.01)


def test_another_precision_is_made_and_told_of(live: Live, home: Path) -> None:
    file = write_tiny(home / "models" / "one" / "model.gguf", "llama")
    marker = {"name": "one", "kind": "gguf", "files": {"model.gguf": file.stat().st_size}}
    (file.parent / "shoal-model.json").write_text(json.dumps(marker))
    answer = live.post("/swarmbench/storage", {"name": "one", "precision": "q8_0"})
    assert answer.json().get("name") == "one-q8_0", answer.text
    told = _until(live, "one-q8_0", ("done",))
    assert told["made"]
    assert told["done"] == told["total"] > 0
    models = {model["name"]: model for model in live.http.get("/swarmbench/storage").json()["models"]}
    assert models["one-q8_0"]["weights"] == "Q8_0"
    again = live.post("/swarmbench/storage", {"name": "one", "precision": "q8_0"})
    assert again.status_code in (200, 400)
    assert live.post("/swarmbench/storage", {"name": "none", "precision": "q8_0"}).status_code == 404


def test_making_one_is_cancelled_and_leaves_nothing(live: Live, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(source: Path, target: Path, kind: str, progress: Any) -> None:
        target.write_bytes(b"half")
        progress(1, 2)
        begun.set()
        assert go_on.wait(60)
        progress(2, 2)

    monkeypatch.setattr("shoal.server.swarmbench.storage.quantize_gguf", slow)
    live.post("/swarmbench/storage", {"name": "one", "precision": "q4_0"})
    assert begun.wait(60)
    assert live.http.delete("/swarmbench/storage/one-q4_0").json() == {"name": "one-q4_0", "freed_bytes": 0}
    go_on.set()
    assert _until(live, "one-q4_0", ("cancelled",))["error"] is None
    assert "one-q4_0" not in {model["name"] for model in live.http.get("/swarmbench/storage").json()["models"]}
    assert not list((home / "models").glob("*q4_0*"))


def test_fetching_one_tells_its_total_is_cancelled_and_leaves_nothing(
    live: Live, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(self: Store, name: str, progress: Any) -> None:
        directory = home / "models" / "org--new"
        directory.mkdir()
        (directory / "half.gguf").write_bytes(b"half")
        progress("download", 4, 8)
        begun.set()
        assert go_on.wait(60)
        progress("download", 8, 8)

    monkeypatch.setattr(Store, "pull", slow)
    live.post("/swarmbench/storage", {"name": "org/new"})
    assert begun.wait(60)
    told = _until(live, "org/new", ("download",))
    assert (told["done"], told["total"]) == (4, 8)
    assert live.http.delete("/swarmbench/storage/org/new").json()["freed_bytes"] == 0
    go_on.set()
    assert _until(live, "org/new", ("cancelled",))["error"] is None
    assert not (home / "models" / "org--new").exists()
