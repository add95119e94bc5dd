"""What a template of an agent replaces, and how a word in braces is written into it."""

from __future__ import annotations

import pytest

from shoal.agents.build.agent import placeholders, render


@pytest.mark.parametrize(
    ("template", "text", "names"),
    [
        ("{q}", "V", ["q"]),
        ("{{q}}", "{q}", []),
        ("{{{q}}}", "{V}", ["q"]),
        (r"\frac{{a}}{{b}} of {q}", r"\frac{a}{b} of V", ["q"]),
        ('{"x": {q}}', '{"x": V}', ["q"]),
        ('{"x": {}, "y": {"z": 1}} {1} {%s} { q } %d \\{', '{"x": {}, "y": {"z": 1}} {1} {%s} { q } %d \\{', []),
        ("{{ user.name }} {% if q %}", "{{ user.name }} {% if q %}", []),
        ("{a.b} {{a.b}}", "V {a.b}", ["a.b"]),
    ],
)
def test_names_in_braces(template: str, text: str, names: list[str]) -> None:
    assert render(template, lambda path: "V") == text
    assert [".".join(path) for path in placeholders(template)] == names
