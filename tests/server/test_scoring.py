"""Log-probabilities of prompts over HTTP: `echo` with `logprobs`, `prompt_logprobs`, and what lm-eval sums them to."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shoal.models import Store
from shoal.models.families import describe
from shoal.models.gguf import read_gguf
from shoal.models.oracle import logits
from tests.server.conftest import MODEL
from tests.support.live import Live, error_of

TEXT = "The capital of France is Paris, and the capital of Italy is"


def exact(tokens: list[int]) -> Any:
    """Log-probabilities [T, V] after each token, by the oracle over the file's own weights."""
    rows = logits(describe(read_gguf(Store().resolve(MODEL, pull=False).path)), tokens).astype(np.float64)
    return rows - np.logaddexp.reduce(rows, axis=-1, keepdims=True)


def test_log_likelihoods_are_those_of_the_oracle(real: Live) -> None:
    context, endings = TEXT, [" Rome", " Madrid", " a banana"]
    codec = real.engine.codec
    assert codec is not None
    prompts = [codec.encode(context + ending, add_special=True) for ending in endings]
    length = len(codec.encode(context, add_special=True))
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    choices = real.post("/v1/completions", body).json()["choices"]
    sums, expected = [], []
    for tokens, choice in zip(prompts, choices, strict=True):
        told = choice["logprobs"]
        assert len(told["tokens"]) == len(tokens) + 1
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        rows = exact(tokens)
        single = np.array([rows[i, token] for i, token in enumerate(tokens[1:])])
        assert np.abs(np.array(told["token_logprobs"][1:-1]) - single).mean() < 0.1  # 8-bit activations
        for top, row in zip(told["top_logprobs"][1:-1], rows, strict=False):
            assert max(top.values()) == pytest.approx(row.max(), abs=0.5)
        sums.append(sum(told["token_logprobs"][length:-1]))
        expected.append(float(single[length - 1 :].sum()))
    assert np.argsort(sums).tolist() == np.argsort(expected).tolist()
    assert sums == pytest.approx(expected, abs=0.5)


def test_echo_with_logprobs_spells_the_prompt_and_the_answer(live: Live) -> None:
    body = {
        "prompt": "naïve?",
        "echo": True,
        "logprobs": 2,
        "max_tokens": 3,
        "temperature": 0,
        "logit_bias": {"98": 100},
    }
    choice = live.post("/v1/completions", body).json()["choices"][0]
    told = choice["logprobs"]
    assert choice["text"] == "naïve?bbb"
    assert told["tokens"][:2] == ["n", "a"]
    assert told["text_offset"] == [0, 1, 2, 2, 3, 4, 5, 6, 7, 8]
    assert [len(top or {}) for top in told["top_logprobs"]] == [0] + [2] * 9
    with live.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        pieces = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    streamed = [json.loads(piece)["choices"][0] for piece in pieces]
    assert "".join(each["text"] for each in streamed) == choice["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for each in streamed if each["logprobs"] for value in each["logprobs"][name]] == told[name]


def test_prompt_logprobs_are_by_token_id(live: Live) -> None:
    body = {"prompt": [104, 105, 106], "prompt_logprobs": 2, "max_tokens": 0}
    answer = live.post("/v1/completions", body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == ""
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    told = choice["prompt_logprobs"]
    assert told[0] is None
    assert "105" in told[1]
    assert "106" in told[2]
    assert told[2]["106"]["decoded_token"] == "j"
    assert all(2 <= len(entry) <= 3 for entry in told[1:])
    chat = live.chat(prompt_logprobs=0).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(live: Live, body: dict[str, Any], param: str) -> None:
    answer = live.post("/v1/completions", {"prompt": "a", **body})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


def test_nothing_is_echoed_without_a_word(live: Live) -> None:
    choice = live.post("/v1/completions", {"prompt": "abc", "echo": True, "max_tokens": 0}).json()["choices"][0]
    assert choice == {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}
