"""`prediction` of the chat API: the same answer, with a count of what was foretold, in every form that clients send."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.live import LETTERS, Live, toy

ASK: dict[str, Any] = {
    "model": "toy",
    "messages": [{"role": "user", "content": "write"}],
    "temperature": 0,
    "max_tokens": 24,
    "logit_bias": LETTERS,
    "ignore_eos": True,
}


def ask(live: Live, **fields: Any) -> tuple[str, dict[str, Any]]:
    answer = live.http.post("/v1/chat/completions", json={**ASK, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["choices"][0]["message"]["content"], body["usage"]["completion_tokens_details"]


def test_a_prediction_changes_nothing_but_the_count() -> None:
    with Live(toy()) as live:
        text, plain = ask(live)
        assert "accepted_prediction_tokens" not in plain
        half = text[:12] + "!" + text[12:]
        for content in (half, [{"type": "text", "text": half}], [{"type": "text", "text": c} for c in half]):
            again, told = ask(live, prediction={"type": "content", "content": content})
            assert again == text
            assert told["accepted_prediction_tokens"] >= 12
            assert told["accepted_prediction_tokens"] + told["rejected_prediction_tokens"] == 25
        again, told = ask(live, prediction={"type": "content", "content": "???"})
        assert again == text
        assert (told["accepted_prediction_tokens"], told["rejected_prediction_tokens"]) == (0, 3)
        again, told = ask(live, prediction={"type": "content", "content": ""})
        assert again == text


def test_the_sdk_reads_the_counts_of_a_whole_answer_and_a_stream() -> None:
    openai: Any = pytest.importorskip("openai", reason="the openai SDK is not installed")
    with Live(toy()) as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {name: value for name, value in ASK.items() if name != "ignore_eos"}
        fields["extra_body"] = {"ignore_eos": True}
        text = client.chat.completions.create(**fields).choices[0].message.content
        fields["prediction"] = {"type": "content", "content": text}
        whole = client.chat.completions.create(**fields)
        assert whole.choices[0].message.content == text
        assert whole.usage.completion_tokens_details.accepted_prediction_tokens == 24
        assert whole.usage.completion_tokens_details.rejected_prediction_tokens == 0
        *_, last = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        assert last.usage.completion_tokens_details.accepted_prediction_tokens == 24


def test_other_forms_are_refused_by_name() -> None:
    with Live(toy()) as live:
        for prediction in ("text", {"type": "other", "content": "a"}, {"type": "content"}, {"type": "content", "x": 1}):
            answer = live.http.post("/v1/chat/completions", json={**ASK, "prediction": prediction})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].startswith("prediction")


def test_what_was_drafted_is_counted() -> None:
    with Live(toy()) as live:
        ask(live)
        stats = live.http.get("/stats").json()["engine"]
        assert stats["drafted_tokens"] >= stats["accepted_tokens"] >= 0
        page = live.http.get("/metrics").text
        assert "shoal_drafted_tokens_total" in page
        assert "shoal_accepted_tokens_total" in page
