"""Tool calls in text: every family's format, whole and in pieces alike, and what only looks like one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidRequestError
from shoal.runners.fake import ByteTokenizer
from shoal.server.errors import ApiError
from shoal.server.prompts import Chat, ToolStyle, chat_tokens
from shoal.server.schemas import ChatMessage, Function, FunctionCall, NamedFunction, NamedTool, Tool, ToolCall
from shoal.server.toolcalls import Piece, ToolCallParser, ToolCallPiece
from shoal.server.tools import tool_use
from shoal.types import Request, SamplingParams
from tests.server.live import toy

CALL = ToolCallPiece("look", '{"at":"sea"}')
OBJECT = '{"name": "look", "arguments": {"at": "sea"}}'
BLOCK = f"<tool_call>\n{OBJECT}\n</tool_call>"
TEXTS: dict[str, list[Piece]] = {
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
    # No calls:
    "Hello": ["Hello"],
    "  Hello <tool": ["  Hello <tool"],
    '{"name": "other", "arguments": {}}': ['{"name": "other", "arguments": {}}'],
    '{"answer": 42} is what I found': ['{"answer": 42} is what I found'],
    '{"name": "look", "arg': ['{"name": "look", "arg'],
    "[1, 2": ["[1, 2"],
    "<tool_call>not JSON</tool_call> after": ["<tool_call>not JSON</tool_call> after"],
    '<tool_call>{"name": "look", "arguments": {"at": </tool_call>': [
        '<tool_call>{"name": "look", "arguments": {"at": </tool_call>'
    ],
    "": [],
    "   ": [],
}


def joined(pieces: list[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and out and isinstance(out[-1], str):
            out[-1] += piece
        else:
            out.append(piece)
    return out


def parse(*texts: str, max_calls: int | None = None) -> list[Piece]:
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
            pieces = [*parser.push(result.text), *parser.finish()]
            assert pieces
            for piece in pieces:
                assert isinstance(piece, ToolCallPiece)
                assert piece.name in ("look", "other")
                assert json.loads(piece.arguments)["at"] in ("sea", "sky")
            assert parallel or len(pieces) == 1


@pytest.mark.parametrize("style", ToolStyle)
def test_with_a_schema_the_answer_is_a_call_or_follows_it(style: ToolStyle) -> None:
    schema = {"type": "object", "properties": {"mood": {"enum": ["happy", "sad"]}}, "required": ["mood"]}
    use = tool_use([tool()], "auto", None)
    kinds = set()
    with toy() as engine:
        fields = {**use.grammar(style, schema), "max_tokens": 2000, "temperature": 1.0}
        requests = [Request(prompt="x", sampling=SamplingParams(seed=seed, **fields)) for seed in range(24)]
        for result in engine.run(requests).results:
            parser = use.parser()
            for piece in joined([*parser.push(result.text), *parser.finish()]):
                kinds.add(type(piece))
                assert isinstance(piece, ToolCallPiece) or json.loads(piece)["mood"] in ("happy", "sad")
    assert kinds == {str, ToolCallPiece}


@pytest.mark.parametrize("style", ToolStyle)
def test_a_strict_tool_is_constrained_only_once_a_call_begins(style: ToolStyle) -> None:
    use = tool_use([tool(strict=True)], None, None)
    with toy() as engine:
        grammars = engine.intake.grammars
        assert grammars is not None
        grammar = grammars.compile(SamplingParams(**use.grammar(style)))
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
