"""Chat templates: messages to the prompt text the model was trained on.

A template is a program that comes with the weights, so it runs in Jinja's immutable sandbox, with a budget on top.
Contained: access to attributes of Python objects beyond data, changes to arguments, loops and recursion without end
(`MAX_STEPS` loop rounds and macro calls), output over `MAX_CHARS`, strings grown by operators, macros or block sets,
huge numbers. Not contained: memory and time of a single filter or method (`|center(10**9)`, `|join` and `|replace` of
texts that grow), so a template from a source you do not trust still deserves a process with a memory limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidRequestError
from shoal.models.toolform import ToolForm, find_form
from shoal.models.traced import Traced, as_content, joined
from shoal.types import Message

if TYPE_CHECKING:
    from jinja2 import Template

MAX_STEPS = 250_000  # about a second
MAX_CHARS = 32_000_000

# What an expression of a template can raise, beside Jinja's own errors: it computes with data of unknown types.
_EXPRESSION_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_MARK = "shoal-probe-text"
_ROLE = re.compile(r"[\w.-]{1,64}")


def _refused(message: str, value: object = None, limit: object = None, hint: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages", value=value, limit=limit, hint=hint)


class ChatTemplate:
    """One Jinja chat template; without a source it exists but refuses to render. May be shared between threads."""

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._variables = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> Traced:
        """The prompt for `messages`, by default up to where the assistant's next message begins.

        The text is `Traced`: it knows which of its characters came out of messages, tools and variables, and
        `Tokenizer.encode_chat` takes control tokens from none of those.
        Content may be a string, a list of text parts (joined by newlines where the template takes only strings), or
        null beside tool calls. `variables` are handed to the template as they are (`enable_thinking=False`).
        Raises `InvalidRequestError` with param "messages" for malformed messages, a missing or broken template,
        and whatever the template itself refuses.
        """
        clean = [self._check(message, index) for index, message in enumerate(messages)]
        if not clean:
            raise _refused("there are no messages", hint="give at least one")
        try:
            clean = [{key: as_content(x) if key != "role" else x for key, x in message.items()} for message in clean]
            inputs = as_content({"documents": None, **variables})
            told = as_content(list(tools or ()))
        except RecursionError as error:
            raise _refused("the messages or tools are nested too deeply") from error
        clean, handed = self._fit_tools(clean, told)
        return self._run(self._fit(clean), add_generation_prompt=add_generation_prompt, **inputs, **handed)

    def _fit_tools(
        self, messages: list[dict[str, Any]], tools: list[Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The messages with tools, calls and results in a form that the template shows, and the tools for it."""
        rounds = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
        if not tools and not rounds:
            return messages, {"tools": None}
        form = self._tool_form
        if form is None or (rounds and not form.rounds):
            what = "no tools" if form is None else "no calls of tools and no results"
            raise InvalidRequestError(
                f"the model's chat template shows {what}, in no form",
                param="tools",
                value=len(tools),
                hint="leave them out, or use another model",
            )
        messages, handed = form.fit(messages, tools)
        return messages, {"tools": None, **handed}

    @cached_property
    def _tool_form(self) -> ToolForm | None:
        def render(messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
            try:
                return self._run(self._fit(messages), add_generation_prompt=True, **{"tools": None, **variables})
            except InvalidRequestError:
                return ""

        return find_form(self.source or "", render)

    def _check(self, message: object, index: int) -> dict[str, Any]:
        """A copy of `message` with a role and with content that is a string or a list of text parts."""
        if not isinstance(message, Mapping):
            raise _refused(f"message {index} is a {type(message).__name__}", message, hint="it must be an object")
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):  # templates write control tokens around it
            hint = "give each message a role of letters, digits, '.', '_' and '-'"
            raise _refused(f"message {index} has role {role!r:.80}", role, hint=hint)
        clean = dict(message)
        calls = clean.get("tool_calls")
        if calls:
            clean["tool_calls"] = _tool_calls(calls, index)
        content = clean.get("content")
        if content is None and calls:
            clean["content"] = ""
        elif isinstance(content, list | tuple):
            clean["content"] = [_part(part, index) for part in content]
        elif not isinstance(content, str):
            raise _refused(
                f"message {index} has content {content!r:.80}", content, hint="it must be a string or a list of parts"
            )
        return clean

    def _fit(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with their content in the form the template takes; unchanged where it takes both or neither."""
        if not any(isinstance(message["content"], list) for message in messages) and self._takes[0]:
            return messages
        takes_text, takes_parts = self._takes
        fitted = []
        for message in messages:
            content = message["content"]
            if isinstance(content, list) and not takes_parts:
                content = joined(["\n"]).join(part["text"] for part in content)
            elif isinstance(content, str) and takes_parts and not takes_text:
                content = [{"type": "text", "text": content}]
            fitted.append({**message, "content": content})
        return fitted

    @cached_property
    def _takes(self) -> tuple[bool, bool]:
        """Whether the template puts (strings, parts) into the prompt as text. Found out by trying."""
        part = [{"type": "text", "text": _MARK}]
        return self._shows(_MARK), self._shows(part)

    def _shows(self, content: object) -> bool:
        try:
            text = self._run([{"role": "user", "content": content}], add_generation_prompt=True, tools=None)
        except InvalidRequestError:
            # A template may insist on more than one user message. Strings are what nearly all take.
            return isinstance(content, str)
        return _MARK in text and "'type'" not in text and '"type"' not in text

    @cached_property
    def _compiled(self) -> Template:
        from jinja2 import TemplateError

        from shoal.models.sandbox import BudgetedEnvironment

        if not self.source:
            raise _refused("the model has no chat template", hint="send a prompt, or use an instruction-tuned model")
        try:
            template = BudgetedEnvironment(MAX_STEPS, MAX_CHARS).from_string(self.source)
        except (TemplateError, RecursionError) as error:
            raise _refused(f"the model's chat template is broken ({error})", hint="use another model file") from error
        template.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        return template

    def _run(self, messages: list[dict[str, Any]], **inputs: Any) -> Traced:
        from jinja2 import TemplateError

        template = self._compiled
        pieces: list[str] = []
        length = 0
        try:
            template.environment.start()  # type: ignore[attr-defined]
            for piece in template.generate(messages=messages, **{**self._variables, **inputs}):
                length += len(piece)
                if length > MAX_CHARS:
                    raise _refused("the chat template's output is too long", length, MAX_CHARS)
                pieces.append(piece)
        except (TemplateError, *_EXPRESSION_ERRORS) as error:
            what = str(error) or type(error).__name__
            raise _refused(
                f"the chat template refused the messages ({what})", hint="check the roles and their order"
            ) from error
        return joined(pieces)


def _part(part: object, index: int) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
        raise _refused(
            f"message {index} has a content part of type {kind!r}",
            kind,
            limit="text",
            hint='parts must be {"type": "text", "text": ...}',
        )
    return dict(part)


def _tool_calls(calls: object, index: int) -> list[dict[str, Any]]:
    """Copies of `calls`."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise _refused(f"message {index} has malformed tool_calls", calls, hint="it must be a list of objects")
    return [dict(call) for call in calls]


def _raise_exception(message: object) -> None:
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
