"""Chat templates: what they are given, what they refuse, and what a hostile one can do."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest

from shoal.errors import InvalidRequestError
from shoal.models import template as template_module
from shoal.models.template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS_ONLY = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
USER = [{"role": "user", "content": "hi"}]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_renders_chatml() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        ("{{ messages[0].content }}", parts("a", "b"), "a\nb"),
        ("{{ messages[0].content }}", "a", "a"),
        (PARTS_ONLY, "a", "a"),
        (PARTS_ONLY, parts("a", "b"), "ab"),
        (BOTH, "a", "a"),
        (BOTH, parts("a", "b"), "[a][b]"),
        ("{{ messages[0].content | trim }}", tuple(parts("a ")), "a"),
    ],
)
def test_content_takes_the_form_the_template_reads(source: str, content: object, text: str) -> None:
    assert ChatTemplate(source).render([{"role": "user", "content": content}]) == text


def test_messages_are_not_changed() -> None:
    message = {"role": "assistant", "content": parts("a"), "tool_calls": [{"function": {"arguments": "{}"}}]}
    ChatTemplate(CHATML).render([message])
    assert message == {"role": "assistant", "content": parts("a"), "tool_calls": [{"function": {"arguments": "{}"}}]}


def test_tool_calls() -> None:
    source = "{{ tools | tojson if tools }}"
    source += "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    source += "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    call = {"function": {"name": "f", "arguments": '{"čas": "<5>"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert ChatTemplate(source).render([message]) == 'f{"čas": "<5>"}'
    call["function"] = {"name": "f", "arguments": "{not json"}
    assert ChatTemplate(source).render([message]) == 'f"{not json"'
    written = '<tool_call>\n{"name": "f", "arguments": "{not json"}\n</tool_call>'
    assert ChatTemplate(CHATML).render([message]).startswith(f"<|im_start|>assistant\n{written}<|im_end|>")


def test_variables_and_helpers() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ tools | tojson(indent=1) }}{{ thinking }}{{ strftime_now('%Y') }}{{ documents is none }}",
        bos_token="<s>",
    )
    text = template.render(USER, tools=[{"name": "f"}], thinking=7)
    assert text == '<s>[\n {\n  "name": "f"\n }\n]7' + str(datetime.now().year) + "True"
    assert ChatTemplate("{{ tools is none }}").render(USER, tools=[]) == "True"
    with pytest.raises(InvalidRequestError, match="no calls"):
        template.render([*USER, {"role": "tool", "content": "x"}])


def test_blocks_are_trimmed_and_extensions_known() -> None:
    source = "  {% for i in range(9) %}\n{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}\n"
    source += "  {% endfor %}\n{% generation %}g{% endgeneration %}{{ 'a' ~ 1 ~ none }}"
    assert ChatTemplate(source).render(USER) == "0\n2\nga1None"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hi"],
        [{"content": "no role"}],
        [{"role": "", "content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "assistant", "content": None, "tool_calls": "f()"}],
        [{"role": "assistant", "content": None, "tool_calls": ["f()"]}],
    ],
)
def test_malformed_messages_are_refused(messages: list[Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(CHATML).render(messages)
    assert caught.value.param == "messages"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "no chat template"),
        ("", "no chat template"),
        ("{% if %}", "broken"),
        ("{% include 'x' %}", "loader"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].role.upper() }}", "no element 7"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages | length | tojson(indent='x' * 2, wrong=1) }}", "wrong"),
        ("{{ {}['k'].x.y }}", "undefined|no attribute"),
    ],
)
def test_a_template_that_fails_says_why(source: str | None, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        ChatTemplate(source).render(USER)
    assert caught.value.param == "messages"


GROW = "{% set n = namespace(x='aaaaaaaaaa') %}{% for i in range(60) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ strftime_now.__globals__.keys() }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ range(10**9) | list }}",
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 9**9**9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ lipsum(n=100000) }}",
        GROW + "{% set n.x = n.x ~ n.x %}{% endfor %}",
        GROW + "{% set n.x = n.x + n.x %}{% endfor %}",
        GROW + "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    ],
)
def test_a_hostile_template_is_contained(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_STEPS", 5_000)
    began = time.perf_counter()
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source).render([{"role": "user", "content": parts("hi")}])
    assert time.perf_counter() - began < 30


@pytest.mark.parametrize("inner", ["strftime_now.__globals__", "raise_exception.__code__", "'{0.__class__}'.format(1)"])
def test_internals_of_functions_do_not_exist_for_a_template(inner: str) -> None:
    assert ChatTemplate("{{ " + inner + " }}").render(USER) == ""


def test_a_template_cannot_shadow_the_budget() -> None:
    source = "{% set tick = 0 %}{% set environment = 0 %}{% for i in range(3) %}{{ i ~ '' }}{% endfor %}"
    assert ChatTemplate(source).render(USER) == "012"
