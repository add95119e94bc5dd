"""How much of their prompts agents share, measured in tokens, and what breaks the sharing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.agents.build.agent import placeholders
from shoal.agents.build.graph import Graph
from shoal.agents.dry_run import Rehearsed, dry_run
from shoal.engine.handles import PrefixCache
from shoal.errors import GraphFileError
from shoal.types import Message

Tokenize = Callable[[Sequence[Message]], Sequence[int]]
"""A chat in, its tokens out."""

_WORTH = 16  # tokens that are worth a word
_TIME = r"\b\d{1,2}:\d{2}(:\d{2})?\b|\b\d{4}-\d{2}-\d{2}\b|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b|\b1[5-9]\d{8}\b"
_NAME = r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|\b[0-9a-f]{24,}\b"
_VOLATILE = {"a timestamp": re.compile(_TIME), "an identifier": re.compile(_NAME, re.I)}
_VOLATILE_NAMES = re.compile(r"now|date|time|timestamp|today|uuid|id|nonce|session|request_id", re.I)


@dataclass(frozen=True, slots=True)
class PromptShare:
    """One prompt: its tokens, how many it shares with the sibling it shares most with, and where that ends."""

    name: str
    tokens: int
    shared: int
    sibling: str | None
    ends_in: str


@dataclass(frozen=True, slots=True)
class Lint:
    """What was measured, and what was found. `common` tokens begin all prompts."""

    shares: tuple[PromptShare, ...]
    common: int
    findings: tuple[str, ...]


def lint_graph(graph: Graph, tokenize: Tokenize, inputs: Mapping[str, Any] | None = None) -> Lint:
    """Measure a graph's prompts, with stand-ins for outputs and for inputs that are not given."""
    scenes = dry_run(graph, inputs)
    prompts = {scene.node.id: scene.layout.messages() for scene in scenes}
    parts = {scene.node.id: scene.layout.parts(scene.agent.name) for scene in scenes}
    tokens = {name: tuple(tokenize(messages)) for name, messages in prompts.items()}
    shares, common = _measure(tokens, lambda name, length: _part_at(parts[name], tokens[name], length, tokenize))
    findings = [*_of_shared(graph, tokenize), *_of_agents(scenes), *_of_twins(scenes, tokenize)]
    return Lint(shares, common, tuple(dict.fromkeys(findings)))


def lint_prompts(prompts: Mapping[str, Sequence[Message]], tokenize: Tokenize) -> Lint:
    """Measure prompts from anywhere, by agent: those that a framework sends, say."""
    tokens = {name: tuple(tokenize(messages)) for name, messages in prompts.items()}
    shares, common = _measure(tokens, lambda name, length: _message_at(prompts[name], length, tokenize))
    findings = []
    for name, messages in prompts.items():
        text = str(messages[0].get("content", "")) if messages else ""
        findings += [f"{name}: {what}" for what in _volatile(text, "its first message")]
    for share in shares:
        if share.sibling and share.ends_in == "system" and share.shared < share.tokens / 4:
            findings.append(
                f"{share.name} leaves {share.sibling} after {share.shared} of {share.tokens} tokens, in the system "
                "message: put what all have first there, and the role into the message after it"
            )
    return Lint(shares, common, tuple(findings))


def read_prompts(path: Path) -> dict[str, list[Message]]:
    """Prompts from a file with one JSON document a line: `agent` and `messages`. `GraphFileError` says which is not."""
    prompts: dict[str, list[Message]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GraphFileError(f"the file cannot be read: {error}", file=str(path), line=1) from error
    for number, line in enumerate(lines, 1):
        try:
            document = json.loads(line)
            name, messages = str(document["agent"]), list(document["messages"])
        except (ValueError, KeyError, TypeError) as error:
            hint = 'give {"agent": ..., "messages": [...]}'
            raise GraphFileError(f"no prompt: {error}", file=str(path), line=number, hint=hint) from error
        while name in prompts:
            name += "'"
        prompts[name] = messages
    return prompts


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return len(PrefixCache.longest_common_prefix([a, b]))


# -- measuring --------------------------------------------------------------------------------------------------


def _measure(
    tokens: Mapping[str, tuple[int, ...]], where: Callable[[str, int], str]
) -> tuple[tuple[PromptShare, ...], int]:
    shares = []
    for name, own in tokens.items():
        best, sibling = 0, None
        for other, theirs in tokens.items():
            length = _common(own, theirs) if other != name else -1
            if length > best or (sibling is None and length >= 0):
                best, sibling = length, other
        ends = "its end" if best == len(own) else where(name, best)
        shares.append(PromptShare(name, len(own), best, sibling, ends))
    every = list(tokens.values())
    common = min((_common(every[0], other) for other in every[1:]), default=len(every[0])) if every else 0
    return tuple(shares), common


def _part_at(parts: Sequence[tuple[str, str]], tokens: tuple[int, ...], length: int, tokenize: Tokenize) -> str:
    """The part of a prompt that token number `length` belongs to."""
    rules = [{"role": "system", "content": parts[0][1]}] if parts[0][0] == "shared" else []
    rest = parts[len(rules) :]
    for count in range(len(rest) + 1):
        text = "\n\n".join(text for _, text in rest[:count])
        begun = tokenize([*rules, {"role": "user", "content": text}]) if count or rules else ()
        if _common(tokens, tuple(begun)) > length:
            return rest[count - 1][0] if count else parts[0][0]
    return parts[-1][0]


def _message_at(messages: Sequence[Message], length: int, tokenize: Tokenize) -> str:
    """The role of the message that token number `length` belongs to."""
    whole = tuple(tokenize(messages))
    for count in range(1, len(messages)):
        if _common(whole, tuple(tokenize(messages[:count]))) > length:
            return str(messages[count - 1].get("role"))
    return str(messages[-1].get("role")) if messages else ""


# -- what breaks it ---------------------------------------------------------------------------------------------


def _of_shared(graph: Graph, tokenize: Tokenize) -> list[str]:
    text = graph.shared
    if not text:
        return ["there is no shared part: put what all agents should know there, once"] if len(graph.nodes) > 1 else []
    findings = _volatile(text, "the shared part")
    for path in placeholders(text):
        name = "{" + ".".join(path) + "}"
        behind = _size(text[text.index(name) + len(name) :], tokenize)
        if _VOLATILE_NAMES.fullmatch(path[-1]):
            findings.append(f"the shared part names {name}, which differs from run to run: put it into a task")
        elif behind > _WORTH:
            findings.append(
                f"{name} stands before {behind} tokens of the shared part, which runs with other inputs cannot share: "
                "put it at the end"
            )
    return findings


def _size(text: str, tokenize: Tokenize) -> int:
    """Tokens that a text adds to a message."""
    return len(tokenize([{"role": "user", "content": text}])) - len(tokenize([{"role": "user", "content": ""}]))


def _volatile(text: str, where: str) -> list[str]:
    found = [(match.start(), what, match[0]) for what, form in _VOLATILE.items() for match in form.finditer(text)]
    return [f"{what} in {where} ({words!r}): no run shares what comes after it" for _, what, words in sorted(found)[:3]]


def _of_agents(scenes: Sequence[Rehearsed]) -> list[str]:
    findings = []
    for scene in scenes:
        agent = scene.agent
        findings += [f"{agent.name}: {what}" for what in _volatile(agent.role, "its role")]
        for path in placeholders(agent.role):
            if path[0] in scene.node.values:
                name = "{" + ".".join(path) + "}"
                findings.append(
                    f"{agent.name}: its role names {name}, so its siblings share nothing after that: "
                    "move it into the task"
                )
    return findings


def _of_twins(scenes: Sequence[Rehearsed], tokenize: Tokenize) -> list[str]:
    """Agents whose own texts begin alike: that text belongs into the shared part."""
    findings = []
    texts = {scene.agent.name: scene.layout.role or scene.layout.task for scene in scenes}
    names = list(texts)
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            length = _common(texts[name].encode(), texts[other].encode())
            words = texts[name].encode()[:length].decode(errors="ignore").rsplit(" ", 1)[0]
            if words and _size(words, tokenize) > _WORTH:
                findings.append(
                    f"{name} and {other} begin with the same words ({words[:40]!r} ...): move them into the shared part"
                )
    return findings
