"""The page's files and its guard: what is served to whom, under which policy, and how much there is of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from shoal.server.swarmbench.page_files import ROOT
from tests.support.live import Live, chat_body, error_of, toy

FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file())
MAX_BYTES = 300_000


@pytest.fixture(scope="module")
def keyed() -> Iterator[Live]:
    with Live(toy(), api_key="secret") as server:
        yield server


def test_the_whole_page_is_light() -> None:
    assert sum((ROOT / name).stat().st_size for name in FILES) < MAX_BYTES


def test_every_file_is_served_under_the_policy(live: Live) -> None:
    for name in ["", *(f"page/{name}" for name in FILES)]:
        answer = live.http.get(f"/{name}")
        assert answer.status_code == 200, name
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert live.http.get("/").text == (ROOT / "index.html").read_text()


@pytest.mark.parametrize("name", ["nothing.js", "../app.py", "%2e%2e/app.py", "vendor", "", "index.html/x"])
def test_nothing_else_is_served(live: Live, name: str) -> None:
    answer = live.http.get(f"/page/{name}")
    assert answer.status_code == 404


def test_the_page_refers_to_its_own_files_only_and_has_no_inline_script() -> None:
    html = (ROOT / "index.html").read_text()
    for place in re.findall(r'(?:src|href)="([^"#][^"]*)"', html):
        assert place.removeprefix("/page/") in FILES, place
    assert re.findall(r"<script(?![^>]*\bsrc=)", html) == []
    assert re.findall(r"\son\w+=|\sstyle=", html) == []
    for name in FILES:
        if name.endswith((".js", ".css")) and not name.startswith("vendor/"):
            text = (ROOT / name).read_text()
            for place in re.findall(r'from "\./([^"]+)"', text):
                assert place in FILES, (name, place)
            assert not re.search(r"https?://(?!www\.w3\.org)", text), name
            assert "innerHTML" not in text, name


def test_vendored_libraries_come_with_their_licences() -> None:
    told = (ROOT / "vendor" / "LICENSES.txt").read_text()
    for name in FILES:
        if name.startswith("vendor/") and name.endswith(".js"):
            assert name.removeprefix("vendor/") in told
    assert "MIT" in told
    assert "Apache License" in told


def test_a_key_is_asked_for_everything_but_the_files(keyed: Live) -> None:
    assert keyed.http.get("/").status_code == 200
    assert keyed.http.get("/page/main.js").status_code == 200
    for method, path in [
        ("GET", "/swarmbench/state"),
        ("GET", "/swarmbench/runs"),
        ("POST", "/swarmbench/runs"),
        ("GET", "/swarmbench/storage"),
    ]:
        assert keyed.http.request(method, path).status_code == 401, path
    assert keyed.http.get("/swarmbench/state", headers={"Authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example."]
)
def test_a_name_that_was_made_to_point_here_gets_nothing(live: Live, host: str) -> None:
    for path in ("/", "/v1/models", "/health", "/swarmbench/runs"):
        answer = live.http.get(path, headers={"Host": host})
        assert (answer.status_code, error_of(answer)["code"]) == (403, "forbidden_host")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:8000", "[::1]:8000", "192.168.1.20:8000", "my-laptop", "a.localhost"]
)
def test_addresses_and_names_of_this_network_are_served(live: Live, host: str) -> None:
    assert live.http.get("/health", headers={"Host": host}).status_code == 200


def test_a_name_is_allowed_by_setting_and_needless_with_a_key(keyed: Live) -> None:
    assert keyed.http.get("/health", headers={"Host": "shoal.example"}).status_code == 200
    with Live(toy(), allowed_hosts=("shoal.example",)) as named:
        assert named.http.get("/health", headers={"Host": "shoal.example:80"}).status_code == 200
        assert named.http.get("/health", headers={"Host": "other.example"}).status_code == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_page_of_another_origin_can_change_nothing(live: Live, origin: str) -> None:
    headers = {"Origin": origin}
    calls = [
        ("POST", "/swarmbench/runs"),
        ("POST", "/models/unload"),
        ("DELETE", "/swarmbench/storage/smollm2-135m"),
        ("PATCH", "/swarmbench/runs/x"),
        ("POST", "/v1/chat/completions"),
    ]
    for method, path in calls:
        answer = live.http.request(method, path, json=chat_body(), headers=headers)
        assert (answer.status_code, error_of(answer)["code"]) == (403, "forbidden_origin"), path
    read = live.http.get("/v1/models", headers=headers)
    assert "access-control-allow-origin" not in read.headers


def test_the_page_itself_and_allowed_origins_may_call(live: Live) -> None:
    own = live.http.post("/v1/chat/completions", json=chat_body(), headers={"Origin": live.url})
    assert own.status_code == 200
    with Live(toy(), cors_origins=("https://app.example",)) as open_to:
        answer = open_to.http.post("/v1/chat/completions", json=chat_body(), headers={"Origin": "https://app.example"})
        assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/swarmbench/runs", "/swarmbench/storage", "/swarmbench/state", "/models/load"])
def test_what_a_form_could_send_is_refused(live: Live, path: str) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = httpx.post(live.url + path, content=b'{"name": "x/y"}', headers={"Content-Type": kind})
        assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_body"), kind
