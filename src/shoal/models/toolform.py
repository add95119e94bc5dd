"""Tools, calls and results in the form that a chat template shows, found out by trying; nothing is dropped silently.

Templates differ: some take tools under another name or without their wrapper, some show calls only of messages whose
content is null or whose arguments are text, some want ids of nine letters, some know tools but not the calls of
earlier turns, some know none of it. What a template does not show is written as text: tools into the system message
(or before the first user message, where there is no such role), calls into the assistant's, results into the user's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from shoal.models.traced import as_content, joined, whole

Messages: TypeAlias = list[dict[str, Any]]
Render: TypeAlias = Callable[[Messages, Mapping[str, Any]], str]
"""Renders messages with extra variables; "" where the template refuses them."""

_EXPLAIN = """You may call functions to help with the task. These are their signatures:
<tools>
{tools}
</tools>
To call one, answer with a JSON object inside tags, and nothing after it:
<tool_call>
{{"name": "function name", "arguments": {{}}}}
</tool_call>"""

_VARIABLES = ("tools", "xml_tools", "functions")  # names under which templates expect tools
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")
_SYSTEM, _TOOL, _ABOUT, _PARAMETER, _CALLED, _VALUE, _RESULT = (f"probe{n}mark" for n in range(7))


@dataclass(frozen=True, slots=True)
class ToolForm:
    """What one template shows. The default shows nothing of tools, as where no template is known.

    `variable`: the name it takes tools by, None for none at all; `bare`: without {"type": "function"} around each.
    `calls`, `results`: it shows those of earlier turns. `null_content`, `text_arguments`, `short_ids`: how it wants
    calls. `system`: it shows system messages. `call_tokens`: what the family writes around calls as text. `rounds`:
    calls and results of earlier turns can be shown at all, if only as text.
    """

    variable: str | None = None
    bare: bool = False
    calls: bool = False
    results: bool = False
    null_content: bool = False
    text_arguments: bool = False
    short_ids: bool = False
    system: bool = True
    call_tokens: tuple[str, str] | None = None
    rounds: bool = True

    def fit(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> tuple[Messages, dict[str, Any]]:
        """`messages` in this form, and the variables that hand over `tools`."""
        fitted = self._messages(messages)
        if not tools:
            return fitted, {}
        if self.variable is None:
            listed = joined(["\n"]).join(_json(tool) for tool in tools)
            before, after = _EXPLAIN.split("{tools}")
            return self._told(fitted, joined([before, listed, after.format()])), {}
        return fitted, {self.variable: [tool.get("function", tool) if self.bare else tool for tool in tools]}

    def _messages(self, messages: Messages) -> Messages:
        fitted: Messages = []
        several = False  # of several results, each says whose it is
        for message in messages:
            calls = list(map(_parsed, message.get("tool_calls") or ()))
            if calls:
                several = len(calls) > 1
            if calls and self.calls:
                message = {**message, "tool_calls": list(map(self._call, calls))}
                if self.null_content and not message["content"]:
                    message["content"] = None
            elif calls:
                message = {**message, "content": self._written(message["content"], calls)}
                del message["tool_calls"]
            if message["role"] == "tool":
                if not self.results:
                    message = _as_user(message, named=several)
                elif self.short_ids and "tool_call_id" in message:
                    message = {**message, "tool_call_id": _short_id(message["tool_call_id"])}
            if message["role"] == "user" and not self.results and fitted and fitted[-1]["role"] == "user":
                text = joined([_text(fitted[-1]["content"]), "\n", _text(message["content"])])
                message = {**fitted.pop(), "content": text}  # templates that insist on turns see one
            fitted.append(message)
        return fitted

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if self.text_arguments and not isinstance(function["arguments"], str):
            call = {**call, "function": {**function, "arguments": _json(function["arguments"])}}
        return {**call, "id": _short_id(call["id"])} if self.short_ids and "id" in call else call

    def _written(self, content: Any, calls: Sequence[Mapping[str, Any]]) -> str:
        """The content of an assistant's message with its calls behind it."""
        functions = [call["function"] for call in calls]
        if self.call_tokens == ("<|tool_call_start|>", "<|tool_call_end|>"):  # LFM2: as Python writes calls
            texts = [
                joined(["<|tool_call_start|>[", joined([", "]).join(map(_python, functions)), "]<|tool_call_end|>"])
            ]
        elif self.call_tokens:  # Granite: a list of objects
            texts = [joined([self.call_tokens[0], _json(list(map(_named, functions))), self.call_tokens[1]])]
        else:
            texts = [joined(["<tool_call>\n", _json(_named(call)), "\n</tool_call>"]) for call in functions]
        content = _text(content)
        return joined(["\n"]).join([content, *texts] if content else texts)

    def _told(self, messages: Messages, text: str) -> Messages:
        """The messages with `text` at the end of their system message, which is made if need be."""
        if not self.system:
            at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
            if at is not None:
                content = joined([text, "\n\n", _text(messages[at]["content"])])
                return [*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :]]
            return [{"role": "user", "content": text}, *messages]
        if messages and messages[0]["role"] == "system":
            content = joined([_text(messages[0]["content"]), "\n\n", text])
            return [{**messages[0], "content": content}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]


def find_form(source: str, render: Render) -> ToolForm | None:
    """The form that the template `source` shows, tried with `render`; None where it shows tools in no form."""
    user = {"role": "user", "content": "x"}
    system = _SYSTEM in render([{"role": "system", "content": _SYSTEM}, user], {})
    form = ToolForm(system=system, call_tokens=_call_tokens(source))
    for variable, bare in itertools.product(_VARIABLES, (False, True)):
        if variable in source:
            tried = replace(form, variable=variable, bare=bare)
            if _shows(render, tried, [user], (_TOOL, _ABOUT, _PARAMETER)):
                return _find_calls(render, tried)
    text = replace(form, call_tokens=None)
    return (
        text if _shows(render, text, _conversation(), (_TOOL, _ABOUT, _PARAMETER, _CALLED, _VALUE, _RESULT)) else None
    )


def _find_calls(render: Render, form: ToolForm) -> ToolForm:
    """`form` with how it shows the calls and results of earlier turns."""
    wanted = (_TOOL, _CALLED, _VALUE, _RESULT)
    for short, null, text in itertools.product((False, True), repeat=3):
        tried = replace(form, calls=True, results=True, short_ids=short, null_content=null, text_arguments=text)
        if _shows(render, tried, _conversation(), wanted):
            return tried
    for calls, results in ((False, True), (True, False), (False, False)):
        tried = replace(form, calls=calls, results=results)
        if _shows(render, tried, _conversation(), wanted):
            return tried
    return replace(form, rounds=False)


def _shows(render: Render, form: ToolForm, messages: Messages, wanted: Sequence[str]) -> bool:
    schema = {"type": "object", "properties": {_PARAMETER: {"type": "string", "description": "x"}}}
    tool = {"type": "function", "function": {"name": _TOOL, "description": _ABOUT, "parameters": schema}}
    fitted, variables = form.fit(messages, [tool])
    text = render(fitted, variables)
    return all(mark in text for mark in wanted)


def _conversation() -> Messages:
    call = {"id": "call_1", "type": "function", "function": {"name": _CALLED, "arguments": {"a": _VALUE}}}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": _CALLED, "content": _RESULT},
    ]


def _call_tokens(source: str) -> tuple[str, str] | None:
    if "<|tool_list_start|>" in source or "List of tools: [" in source:
        return "<|tool_call_start|>", "<|tool_call_end|>"
    return ("<|tool_call|>", "") if "<|tool_call|>" in source else None


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a call with its arguments as an object: templates expect those, the OpenAI API sends JSON text.

    Ones that are no JSON stay text: a model may have written them badly.
    """
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        with suppress(ValueError, RecursionError):
            arguments = as_content(json.loads(arguments))
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _json(value: object) -> str:
    return whole(json.dumps(value, ensure_ascii=False), value)


def _named(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function.get("name"), "arguments": function.get("arguments")}


def _python(function: Mapping[str, Any]) -> str:
    """A call as Python writes it: name(key="text", other=1)."""
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        return joined([str(function.get("name")), "(", _json(arguments), ")"])
    pairs = [
        joined([key, "=", _json(value) if isinstance(value, str) else whole(repr(value), value)])
        for key, value in arguments.items()
    ]
    return joined([str(function.get("name")), "(", joined([", "]).join(pairs), ")"])


def _as_user(message: Mapping[str, Any], *, named: bool) -> dict[str, Any]:
    """A result as text, under the name of its tool where there are several."""
    name = message.get("name")
    head = [name, ": "] if named and name else []
    text = joined(["<tool_response>\n", *head, _text(message["content"]), "\n</tool_response>"])
    return {"role": "user", "content": text}


def _text(content: Any) -> str:
    """Content as one text: the texts of its parts, where it is a list of them."""
    return joined(["\n"]).join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _short_id(name: object) -> str:
    """Nine letters and digits in place of an id; the same ones for the same id."""
    text = str(name)
    return text if _SHORT_ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]
