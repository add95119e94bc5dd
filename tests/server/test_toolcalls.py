"""Tool calls in text: every family's format, whole and in pieces alike, and what only looks like one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidRequestError
from shoal.runners.fake import ByteTokenizer
from shoal.server.errors import ApiError
from shoal.server.openai.calljson import CallDelta
from shoal.server.openai.prompts import Chat, ToolStyle, chat_tokens
from shoal.server.openai.schemas import ChatMessage, Function, FunctionCall, NamedFunction, NamedTool, Tool, ToolCall
from shoal.server.openai.toolcalls import Piece, ToolCallParser, WrittenCall, note_call
from shoal.server.openai.tools import tool_use
from shoal.types import Request, SamplingParams
from tests.support.live import toy

CALL = ("look", '{"at": "sea"}')
OBJECT = '{"name": "look", "arguments": {"at": "sea"}}'
BLOCK = f"<tool_call>\n{OBJECT}\n</tool_call>"
Said = str | tuple[str, str]
NO_ARGUMENTS = [
    '{"name": "look"}',
    '{"name": "look", "arguments": null}',
    '{"name": "look", "parameters": null }',
    '{"name": "look", "arguments": ""}',
    '{"name": "look", "arguments": " \\n"}',
    '{"name": "look", "arguments": "null"}',
    '{"name": "look", "arguments": {}}',
    '{"name": "look", "arguments": "{}"}',
    '{"arguments": null, "name": "look"}',
    '{"arguments": "", "name": "look"}',
    '{"id": "c1", "type": "function", "function": {"name": "look"}}',
    '{"type": "function", "function": {"name": "look", "arguments": null}}',
    '{"type": "function", "function": {"name": "look", "arguments": ""}}',
    '{"function": "look"}',
]
TEXTS: dict[str, list[Said]] = {
    BLOCK: [CALL],
    f"Let me see.\n{BLOCK}": ["Let me see.\n", CALL],
    f"{BLOCK}\n{BLOCK}": [CALL, CALL],
    f"{BLOCK} Done.": [CALL, "Done."],
    f"<tool_call>\n{OBJECT}": [CALL],  # the block was never closed
    f"<tool_call>[{OBJECT},{OBJECT}]</tool_call>": [CALL, CALL],
    '{"name": "look", "parameters": {"at": "sea"}}': [CALL],
    '<|python_tag|>{"name": "look", "parameters": {"at": "sea"}}': [CALL],
    f"{OBJECT}; {OBJECT}": [CALL, CALL],
    f"\n[{OBJECT}, {OBJECT}]": [CALL, CALL],
    f"[TOOL_CALLS] [{OBJECT}]": [CALL],
    '{"type": "function", "function": {"name": "look", "arguments": "{\\"at\\": \\"sea\\"}"}}': [CALL],
    '{"function": "look", "arguments": {"at": "sea"}}': [CALL],
    '{"arguments": {"at": "sea"}, "name": "look"}': [CALL],
    '{"arguments": "{\\"at\\": \\"sea\\"}", "id": 7, "name": "look"}': [CALL],
    '{"id": "c1", "more": [{"}": 1}], "name": "look", "arguments": {"at": "sea"}, "x": {"y": "}"}} ok': [CALL, "ok"],
    '{"name": "look", "arguments": "{\\"at\\": \\"\\ud83d\\ude00\\u00e9\\n\\"}"}': [("look", '{"at": "😀é\n"}')],
    '<tool_call>{"name": "look", "arguments": {"at": "a </tool_call> in words"}}</tool_call>': [
        ("look", '{"at": "a </tool_call> in words"}')
    ],
    **{spelt: [("look", "{}")] for spelt in NO_ARGUMENTS},
    **{f"<tool_call>\n{spelt}\n</tool_call>": [("look", "{}")] for spelt in NO_ARGUMENTS},
    **{f"[{spelt}, {OBJECT}]": [("look", "{}"), CALL] for spelt in NO_ARGUMENTS},
    # No calls:
    "Hello": ["Hello"],
    "  Hello <tool": ["  Hello <tool"],
    '{"name": "other", "arguments": {}}': ['{"name": "other", "arguments": {}}'],
    '{"answer": 42} is what I found': ['{"answer": 42} is what I found'],
    '{"name": "look", "arg': ['{"name": "look", "arg'],
    "[1, 2": ["[1, 2"],
    "<tool_call>not JSON</tool_call> after": ["<tool_call>not JSON</tool_call> after"],
    '<tool_call>{"name": "look", "arguments": [1]}</tool_call>': [
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'
    ],
    '{"name": "look", "at": "sea"} is all': ['{"name": "look", "at": "sea"} is all'],
    '{"name": "look", "arguments": nul} is all': ['{"name": "look", "arguments": nul} is all'],
    '{"name": "look", "arguments": nulls} is all': ['{"name": "look", "arguments": nulls} is all'],
    '{"name": "look", "arguments": 7} is all': ['{"name": "look", "arguments": 7} is all'],
    '{"name": "look", "arguments": "nil"} is all': ['{"name": "look", "arguments": "nil"} is all'],
    '{"name": "look", "arguments": "nul"} is all': ['{"name": "look", "arguments": "nul"} is all'],
    '{"name": "look"': ['{"name": "look"'],
    '{"arguments": {}} is all': ['{"arguments": {}} is all'],
    '{"name": "look", "arguments": "at the sea"}': ['{"name": "look", "arguments": "at the sea"}'],
    f"see <tool_call>x {BLOCK}": ["see <tool_call>x ", CALL],
    f'{{"a": {BLOCK}': ['{"a": ', CALL],
    # Calls whose JSON went wrong: what was written of the arguments is the caller's to judge, as the API documents.
    '<tool_call>{"name": "look", "arguments": {"at": </tool_call> so': [("look", '{"at": '), "so"],
    f'<tool_call>{{"name": "look", "arguments": {{"at": "sea\n</tool_call>{BLOCK}': [("look", '{"at": "sea\n'), CALL],
    '{"name": "look", "arguments": {"at": sea}}': [("look", '{"at": sea}')],
    '{"name": "look", "arguments": {"at": "s': [("look", '{"at": "s')],
    f"<tool_call>{OBJECT}}}}}\n</tool_call>\n{BLOCK}": [CALL, CALL],  # a bracket too many
    f"<tool_call>{OBJECT}\n{OBJECT}</tool_call>": [CALL, CALL],
    f"<tool_call>{OBJECT}\n{BLOCK}": [CALL, CALL],  # the first was never closed
    f"{OBJECT[:-1]} and so on": [CALL, "and so on"],
    f"[{OBJECT}, 5]": [CALL, "5]"],
    "": [],
    "   ": [],
}


def joined(pieces: Iterable[Piece]) -> list[Said]:
    """What the pieces add up to: texts, and calls as name and arguments."""
    out: list[Said] = []
    calls: list[WrittenCall] = []
    for piece in pieces:
        if isinstance(piece, str):
            if out and isinstance(out[-1], str):
                out[-1] += piece
            else:
                out.append(piece)
            continue
        call = note_call(calls, piece)
        if piece.name is None:
            out.pop()
        out.append((call.name, call.arguments))
    return out


def parse(*texts: str, max_calls: int | None = None) -> list[Said]:
    parser = ToolCallParser(["look"], max_calls)
    pieces = [piece for text in texts for piece in parser.push(text)]
    return joined([*pieces, *parser.finish()])


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:30])
def test_every_format_is_understood(text: str) -> None:
    assert parse(text) == TEXTS[text]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:30])
def test_one_character_at_a_time_gives_the_same(text: str) -> None:
    assert parse(*text) == TEXTS[text]


@given(st.text(alphabet='<>/tool_cal{}[]"\\:, \nTOOLCALLS|pyhng', max_size=80), st.data())
def test_pieces_do_not_depend_on_how_the_text_is_cut(text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    whole = parse(text)
    assert parse(text[:cut], text[cut:]) == whole
    assert parse(*text) == whole


ARGUMENTS = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=12) | st.floats(allow_nan=False, width=16),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@st.composite
def written_calls(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]]]:
    """Calls in one of the formats, spelt as a model might, and their arguments."""
    calls = draw(st.lists(ARGUMENTS, min_size=1, max_size=3))
    style = draw(st.sampled_from(["hermes", "llama", "mistral", "function"]))
    spelling: dict[str, Any] = {
        "ensure_ascii": draw(st.booleans()),
        "indent": draw(st.sampled_from([None, 1])),
        "separators": draw(st.sampled_from([None, (",", ":")])),
    }
    objects = []
    for arguments in calls:
        given: Any = json.dumps(arguments, **spelling) if draw(st.booleans()) else arguments
        fields = [("name", "look"), ("parameters" if style == "llama" else "arguments", given)]
        fields += [("id", "x}")] if draw(st.booleans()) else []
        call: dict[str, Any] = dict(draw(st.permutations(fields)))
        objects.append(json.dumps({"type": "function", "function": call} if style == "function" else call, **spelling))
    if style == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects), calls
    if style == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]", calls
    return "; ".join(objects), calls


def cuts(data: st.DataObject, text: str) -> list[str]:
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[begin:end] for begin, end in zip([0, *at], [*at, len(text)], strict=True)]


@given(written_calls(), st.data())
def test_any_call_in_any_format_cut_anywhere_is_that_call(
    written: tuple[str, list[dict[str, Any]]], data: st.DataObject
) -> None:
    text, calls = written
    whole = parse(text)
    assert [("look", json.loads(said[1])) for said in whole if said[0] == "look"] == [("look", call) for call in calls]
    assert len(whole) == len(calls)
    assert parse(*cuts(data, text)) == parse(*text) == whole


@given(written_calls(), st.data())
def test_calls_that_went_wrong_are_the_same_however_they_are_cut(
    written: tuple[str, list[dict[str, Any]]], data: st.DataObject
) -> None:
    text = written[0]
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(text)))
        end = min(len(text), begin + data.draw(st.integers(0, 3)))
        text = text[:begin] + data.draw(st.text(alphabet='<>{}[]"\\:,u \nlt/', max_size=2)) + text[end:]
    limit = data.draw(st.sampled_from([None, 1]))
    whole = parse(text, max_calls=limit)
    assert parse(*cuts(data, text), max_calls=limit) == parse(*text, max_calls=limit) == whole


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser(["look"])
    assert parser.push('<tool_call>{"name": "look", "argu') == []
    assert parser.push('ments": ') == []
    begun = parser.push('{"at": "s')
    assert [(d.name, d.arguments) for d in begun if isinstance(d, CallDelta)] == [("look", ""), (None, '{"at": "s')]
    assert parser.push("ea") == [CallDelta("ea")]
    assert parser.push('"}') == [CallDelta('"}', done=True)]
    assert parser.push("}\n</tool_call>") == []
    assert parser.finish() == []


def test_text_is_not_held_longer_than_it_may_yet_be_a_call() -> None:
    parser = ToolCallParser(["look"])
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" <") == [" "]
    assert parser.push("b>") == ["<b>"]


def test_no_more_calls_than_allowed() -> None:
    assert parse(f"{BLOCK}\n{BLOCK} and so on", max_calls=1) == [CALL]
    assert parse(f"[{OBJECT}, {OBJECT}]", max_calls=1) == [CALL]


def tool(name: str = "look", *, strict: bool | None = None) -> Tool:
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"Place": {"enum": ["sea", "sky"]}},
    }
    return Tool(type="function", function=Function(name=name, parameters=schema, strict=strict))


def test_choices_that_contradict_are_refused() -> None:
    named = NamedTool(type="function", function=NamedFunction(name="look"))
    for tools, choice in (([], "required"), (None, named), ([tool("other")], named), ([tool(), tool()], "auto")):
        with pytest.raises(ApiError):
            tool_use(tools, choice, None)
    assert not tool_use([tool()], "none", None).active
    assert tool_use([tool(), tool("other")], named, None).forced == [tool()]


@pytest.mark.parametrize("style", ToolStyle)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_forced_call_is_always_a_call(style: ToolStyle, parallel: bool) -> None:
    """The toy model writes noise; the grammar makes calls of it."""
    use = tool_use([tool(), tool("other")], "required", parallel)
    with toy() as engine:
        requests = [
            Request(prompt="x", sampling=SamplingParams(max_tokens=2000, temperature=1, seed=s, **use.grammar(style)))
            for s in range(4)
        ]
        for result in engine.run(requests).results:
            assert result.finish_reason == "stop", result
            parser = use.parser()
            calls = joined([*parser.push(result.text), *parser.finish()])
            assert calls
            for call in calls:
                assert isinstance(call, tuple)
                assert call[0] in ("look", "other")
                assert json.loads(call[1])["at"] in ("sea", "sky")
            assert parallel or len(calls) == 1


@pytest.mark.parametrize("style", ToolStyle)
def test_with_a_schema_the_answer_is_a_call_or_follows_it(style: ToolStyle) -> None:
    schema = {"type": "object", "properties": {"mood": {"enum": ["happy", "sad"]}}, "required": ["mood"]}
    use = tool_use([tool()], "auto", None)
    kinds = set()
    with toy() as engine:
        fields = {**use.grammar(style, schema), "max_tokens": 2000, "temperature": 1.0}
        requests = [Request(prompt="x", sampling=SamplingParams(seed=seed, **fields)) for seed in range(120)]
        for result in engine.run(requests).results:
            parser = use.parser()
            for piece in joined([*parser.push(result.text), *parser.finish()]):
                kinds.add(type(piece))
                assert isinstance(piece, tuple) or json.loads(piece)["mood"] in ("happy", "sad")
    assert kinds == {str, tuple}


@pytest.mark.parametrize("style", ToolStyle)
def test_a_strict_tool_is_constrained_only_once_a_call_begins(style: ToolStyle) -> None:
    use = tool_use([tool(strict=True)], None, None)
    with toy() as engine:
        grammar = engine._loop.inputs.compile(SamplingParams(**use.grammar(style)))
        key = "parameters" if style is ToolStyle.LLAMA else "arguments"
        good = f'{{"name":"look","{key}":{{"at":"sea"}}}}'
        bad = f'{{"name":"look","{key}":{{"at":"moon"}}}}'
        wrap = {
            ToolStyle.HERMES: "<tool_call>\n{}\n</tool_call>",
            ToolStyle.LLAMA: "{}",
            ToolStyle.MISTRAL: "[{}]",
        }[style]
        for text, allowed in (("Hello there, <b>", True), (wrap.format(good), True), (wrap.format(bad), False)):
            constraint = grammar.start()
            for byte in text.encode():
                constraint.accept(byte)
            assert (constraint.error is None) is allowed, text


def test_a_template_without_tools_is_told_of_them() -> None:
    call = ToolCall(id="c", function=FunctionCall(name="look", arguments='{"at": "sea"}'))
    messages = [
        ChatMessage(role="user", content="Where?"),
        ChatMessage(role="assistant", tool_calls=[call]),
        ChatMessage(role="tool", tool_call_id="c", content="blue"),
    ]
    codec = ByteTokenizer()
    text = codec.decode([token for token in chat_tokens(codec, Chat(messages, [tool()])) if token < 256])
    assert "<tools>" in text
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>' in text
    assert "<tool_response>\nblue\n</tool_response>" in text


def test_two_grammars_at_once_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="grammar"):
        SamplingParams(json_schema={}, grammar="start: /a/")


def shown(messages: list[Any], tools: list[Tool] | None = None) -> str:
    """What a template without tools makes of a conversation."""
    codec = ByteTokenizer()
    return codec.decode([token for token in chat_tokens(codec, Chat(messages, tools or [tool()])) if token < 256])


def test_results_stand_in_the_order_of_their_calls_and_are_named() -> None:
    calls = [ToolCall(id=f"c{i}", function=FunctionCall(name=name)) for i, name in enumerate(("look", "hear", "smell"))]
    results = [ChatMessage(role="tool", tool_call_id=f"c{i}", content=f"result {i}") for i in (2, 0, 1)]
    again = [ChatMessage(role="user", content="more"), ChatMessage(role="tool", tool_call_id="c0", content="stray")]
    text = shown([ChatMessage(role="assistant", tool_calls=calls), *results, *again])
    places = [text.index(f"{name}: result {i}") for i, name in enumerate(("look", "hear", "smell"))]
    assert places == sorted(places)
    assert "<tool_response>\nstray" in text


def test_results_by_the_hundred_are_put_in_order() -> None:
    calls = [ToolCall(id=f"c{i}", function=FunctionCall(name="look")) for i in range(500)]
    results = [ChatMessage(role="tool", tool_call_id=f"c{i}", content=str(i)) for i in reversed(range(500))]
    text = shown([ChatMessage(role="assistant", tool_calls=calls), *results])
    assert text.index("look: 7\n") < text.index("look: 499\n")


@pytest.mark.parametrize("arguments", [None, "", "  \n", "null", "{}"])
def test_no_arguments_in_any_spelling_are_an_empty_object(arguments: str | None) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    absent = {"id": "c", "function": {"name": "look"}}
    for spelt in [call, *([absent] if arguments is None else [])]:
        messages = [ChatMessage(role="assistant", tool_calls=[ToolCall.model_validate(spelt)])]
        written = re.findall(r"<tool_call>\n(.*)\n</tool_call>", shown(messages))[-1]
        assert json.loads(written) == {"name": "look", "arguments": {}}


def test_malformed_arguments_of_history_leave_valid_json_around_them() -> None:
    for arguments in ('{"at": ', "[" * 100_000):
        call = ToolCall(id="c", function=FunctionCall(name="look", arguments=arguments))
        text = shown([ChatMessage(role="assistant", tool_calls=[call])])
        written = text.rsplit("<tool_call>\n", 1)[1].split("\n</tool_call>")[0]
        assert json.loads(written) == {"name": "look", "arguments": arguments}


def test_what_is_not_ascii_reaches_the_prompt_as_itself() -> None:
    words = "Dej mi počasí v městě 北京 😀"
    parameters = {"type": "object", "properties": {"město": {"type": "string", "description": words}}}
    told = Tool(type="function", function=Function(name="look", description=words, parameters=parameters))
    call = ToolCall(id="c", function=FunctionCall(name="look", arguments='{"město": "北京"}'))
    text = shown([ChatMessage(role="user", content="x"), ChatMessage(role="assistant", tool_calls=[call])], [told])
    assert text.count(words) == 2
    assert '{"město": "北京"}' in text
    assert "\\u" not in text


@pytest.mark.parametrize("order", ['{{"name": "look", "arguments": "{0}"}}', '{{"arguments": "{0}", "name": "look"}}'])
def test_half_of_a_surrogate_pair_in_a_call_can_go_out(order: str) -> None:
    parser = ToolCallParser(["look"])
    pieces = [*parser.push(order.format('{\\"a\\": \\"\\ud800\\"}')), *parser.finish()]
    written = "".join(piece.arguments for piece in pieces if isinstance(piece, CallDelta))
    assert json.loads(written.encode().decode()) == {"a": "\ufffd"}
