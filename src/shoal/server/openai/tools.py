"""Which tools a call may use, and the grammar that makes sure of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.engine.engine import Engine
from shoal.errors import InvalidRequestError
from shoal.sampling.grammar import json_options
from shoal.sampling.schema import check_schema, closed, translated, unchecked_formats
from shoal.server.errors import bad_request
from shoal.server.openai.prompts import ToolStyle
from shoal.server.openai.schemas import NamedTool, Tool
from shoal.server.openai.toolcalls import ToolCallParser
from shoal.types import SamplingParams

_MAX_CALLS = 8  # of one constrained answer; a small model would go on for ever


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one call. `shown` are in the prompt, `forced` are those one of which must be called.

    `barred`: none may be called. They are shown all the same, so that the prompt begins as on the other turns.
    """

    shown: Sequence[Tool] = ()
    forced: Sequence[Tool] = ()
    parallel: bool = True
    barred: bool = False

    @property
    def active(self) -> bool:
        """True when the answer may hold tool calls."""
        return bool(self.shown) and not self.barred

    def parser(self) -> ToolCallParser:
        """What finds the calls in the answer."""
        return ToolCallParser([t.function.name for t in self.shown], None if self.parallel else 1)

    def held(self, engine: Engine, style: ToolStyle, schema: dict[str, Any] | None, place: str) -> dict[str, Any]:
        """As `grammar`, and compiled: ApiError names the tool whose parameters cannot be honoured, by its `place`."""
        try:
            for tool in self.shown if self.constrained(schema) else ():
                check_schema(tool.function.parameters or {})
            arguments = self.grammar(style, schema)
            if self.shown and arguments:
                engine.check_grammar(SamplingParams(**arguments))
        except InvalidRequestError:
            if self.active:
                self._blame(engine, place)
            raise
        return arguments

    def constrained(self, schema: Mapping[str, Any] | None) -> bool:
        """True when calls in the answer are held to the parameters of their tools."""
        return self.active and (
            bool(self.forced) or schema is not None or any(tool.function.strict for tool in self.shown)
        )

    def unchecked(self, schema: Mapping[str, Any] | None) -> list[str]:
        """Formats in the schemas that hold the answer to which it is not held."""
        schemas: list[Mapping[str, Any]] = (
            [t.function.parameters or {} for t in self.shown] if self.constrained(schema) else []
        )
        schemas += [schema] if schema is not None else []
        return sorted({form for one in schemas for form in unchecked_formats(one)})

    def _blame(self, engine: Engine, place: str) -> None:
        """Raise an ApiError for the tool of whose parameters alone no grammar can be made, if there is one.

        The tools are halved until one is left, which costs about two grammars of them all.
        """
        tools = list(enumerate(self.shown))
        while len(tools) > 1:
            half = tools[: len(tools) // 2]
            tools = half if _refusal(engine, half) is not None else tools[len(half) :]
        error = _refusal(engine, tools)
        if error is not None:
            param = place.format(tools[0][0])
            raise bad_request(str(error).replace("json_schema", param, 1), param) from error

    def grammar(self, style: ToolStyle, schema: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Arguments for `SamplingParams` that hold the answer to what was asked; empty when nothing was.

        With a `schema` the answer follows that, unless it is a tool call.
        """
        most = _MAX_CALLS if self.parallel else 1
        if self.forced:
            return {"grammar": _called(self.forced, style, most)}
        if schema is not None and self.active:
            return {"grammar": _called(self.shown, style, most, closed(schema))}
        if schema is not None:
            return {"json_schema": closed(schema)}
        if self.barred:
            return {"grammar": _uncalled(self.shown)}
        if any(tool.function.strict for tool in self.shown):
            return {"grammar": _optional(self.shown, style)}
        return {}


def _refusal(engine: Engine, tools: Sequence[tuple[int, Tool]]) -> InvalidRequestError | None:
    """Why no grammar can be made of the parameters of some tools together; None when one can."""
    parts = {str(number): tool.function.parameters or {} for number, tool in tools}
    schema: Mapping[str, Any] = next(iter(parts.values()))
    if len(parts) > 1:
        moved = {name: _moved(part, f"#/properties/{name}") for name, part in parts.items()}
        schema = {"type": "object", "properties": moved, "required": list(parts)}
    try:
        for part in parts.values():
            check_schema(part)
        engine.check_grammar(SamplingParams(json_schema=schema))
    except InvalidRequestError as error:
        return error
    return None


def tool_use(tools: Sequence[Tool] | None, choice: str | NamedTool | None, parallel: bool | None) -> ToolUse:
    """What `tools`, `tool_choice` and `parallel_tool_calls` mean together. ApiError when they contradict."""
    tools = tools or ()
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("two tools have the same name", "tools")
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            raise bad_request("tool_choice asks for a tool and there are no tools", "tool_choice")
        return ToolUse()
    if choice == "none":
        return ToolUse(tools, barred=True)
    several = parallel is not False
    if isinstance(choice, NamedTool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise bad_request(f"tool_choice names {choice.function.name!r}, which is not in tools", "tool_choice")
        return ToolUse(tools, named, parallel=False)
    return ToolUse(tools, tools if choice == "required" else (), several)


def _calls_schema(tools: Sequence[Tool], style: ToolStyle) -> dict[str, Any]:
    """A schema whose values are a call of one of `tools`. Their local references are moved along."""
    key = "parameters" if style is ToolStyle.LLAMA else "arguments"
    definitions: dict[str, Any] = {}
    options = []
    for number, tool in enumerate(tools):
        place = f"tool{number}"
        parameters = tool.function.parameters or {"type": "object", "properties": {}}
        definitions[place] = _moved(closed(parameters), f"#/$defs/{place}")
        options.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, key: {"$ref": f"#/$defs/{place}"}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return {"anyOf": options, "$defs": definitions}


def _moved(value: Any, root: str) -> Any:
    """A schema as part of a larger one: references that began at its root begin at `root`."""
    if isinstance(value, dict):
        return {
            k: root + v[1:] if k == "$ref" and isinstance(v, str) and v.startswith("#") else _moved(v, root)
            for k, v in value.items()
        }
    return [_moved(item, root) for item in value] if isinstance(value, list) else value


def _called(tools: Sequence[Tool], style: ToolStyle, most: int, answer: Mapping[str, Any] | None = None) -> str:
    """One to `most` calls in the model's format, or an answer that follows a schema."""
    start = "start: calls\n" if answer is None else "start: calls | answer\n"
    body = _calls_schema(tools, style) if style is ToolStyle.HERMES else _bare(tools, style, most)
    if style is ToolStyle.HERMES:
        more = f' ("\\n" call){{0,{most - 1}}}' if most > 1 else ""
        calls = f'calls: call{more}\ncall: "<tool_call>\\n" body "\\n</tool_call>"\nbody: '
    else:
        calls = "calls: "
    if answer is None:
        return f"{start}{calls}{_json(body)}"
    return f"{start}{calls}{_json(body, answer)}answer: {_json(answer, body)}"


def _bare(tools: Sequence[Tool], style: ToolStyle, most: int) -> dict[str, Any]:
    """Calls without anything around them: one object, or a list in Mistral's format."""
    schema = _calls_schema(tools, style)
    if style is not ToolStyle.MISTRAL:
        return schema
    definitions = schema.pop("$defs")
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": most, "$defs": definitions}


def _uncalled(tools: Sequence[Tool]) -> str:
    """Free text in which no call of these tools is, in any format that is taken for one."""
    names = "|".join(re.escape(tool.function.name) for tool in tools)
    bare = rf"(.|\n)*\{{\s*\"name\"\s*:\s*\"({names})\"(.|\n)*"
    return f"start: TEXT\nTEXT: /(.|\\n)*/ & ~/((.|\\n)*<tool_call>(.|\\n)*)|({bare})/"


def _optional(tools: Sequence[Tool], style: ToolStyle) -> str:
    """Free text, in which a call that begins must be a right one."""
    if style is ToolStyle.HERMES:
        return (
            "start: (called)* TEXT\n"
            'opened[lazy]: TEXT "<tool_call>"\n'
            'called: opened "\\n" body "\\n</tool_call>"\n'
            f"TEXT: /(.|\\n)*/\nbody: {_json(_calls_schema(tools, style))}"
        )
    return f"start: body | TEXT\nTEXT: /([^{{\\[](.|\\n)*)?/\nbody: {_json(_bare(tools, style, _MAX_CALLS))}"


def _json(schema: Mapping[str, Any], *beside: Mapping[str, Any]) -> str:
    """A schema as the right side of a Lark rule; `beside` are others in the same grammar."""
    return f"%json {json.dumps({**translated(schema), 'x-guidance': json_options(schema, *beside)})}\n"
