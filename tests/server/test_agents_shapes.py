"""Requests in the shapes that coding agents send (written by us after them) are answered, and stream to their end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.live import Live

SHAPES = sorted((Path(__file__).parent / "agents").glob("*.json"))


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_a_coding_agents_request_is_answered(live: Live, path: Path) -> None:
    shape = json.loads(path.read_text("utf-8"))
    whole = live.post(shape["path"], {**shape["body"], "stream": False, "stream_options": None})
    assert whole.status_code == 200, whole.text
    streamed = live.post(shape["path"], shape["body"])
    assert streamed.status_code == 200, streamed.text
    assert '"error":{' not in streamed.text
    end = {"/v1/messages": "message_stop", "/v1/responses": "response.incomplete"}.get(shape["path"], "[DONE]")
    assert end in streamed.text.rstrip().rpartition("\n\n")[2]
    live.wait_idle()
