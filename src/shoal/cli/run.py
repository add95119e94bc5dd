"""`shoal run`: one prompt, one stream."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli import options
from shoal.cli.console import Interrupts, load_engine, note, pace, printable
from shoal.errors import InvalidRequestError

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.types import Request, Result, SamplingParams


def run(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to answer; - reads standard input.")],
    model: options.Model = options.DEFAULT_MODEL,
    raw: Annotated[bool, typer.Option("--raw", help="Go on with the prompt as it is, without chat template.")] = False,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this likely relative to the best; 0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages what occurred before.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Taken off the score of tokens written before.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, for each time they were written.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the run repeatable.")] = None,
    precision: options.Precision = options.PRECISION,
    kv_memory: options.KVMemory = options.KV_MEMORY,
    threads: options.Threads = None,
    governor: options.Governor = False,
    joules: options.Joules = None,
    battery: options.Battery = None,
) -> None:
    """Answer one prompt, printing tokens as they come. What it took goes to standard error."""
    from shoal.types import SamplingParams

    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=tuple(stop or ()),
        seed=seed,
    )
    request = _request(_text(prompt), sampling, raw=raw)
    with Interrupts() as interrupts:
        note(f"loading {model}")
        power = options.power(governor, joules, battery)
        settings = {"precision": precision, "kv_memory": kv_memory, "threads": threads, "power": power}
        with load_engine(model, max_batch=1, **settings) as engine:
            interrupts.hold()
            result = _stream(engine, request, interrupts)
            paced = pace(engine)
    if result.error is not None:
        raise result.error
    _report(result, paced)
    if interrupts.wanted:
        raise typer.Exit(130)


def _text(prompt: str) -> str:
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                f"standard input is not UTF-8 (byte {error.start})", param="prompt", hint="convert it first"
            ) from error
    if not prompt.strip():
        raise InvalidRequestError("the prompt is empty", param="prompt", value=prompt, hint="give some text")
    return prompt


def _request(prompt: str, sampling: SamplingParams, *, raw: bool) -> Request:
    from shoal.types import Request

    if raw:
        return Request(prompt=prompt, sampling=sampling)
    return Request(messages=[{"role": "user", "content": prompt}], sampling=sampling)


def _stream(engine: Engine, request: Request, interrupts: Interrupts) -> Result:
    """Print the text of a request as it comes. A terminal is shielded from control characters in it."""
    import queue

    from shoal.types import Event

    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    handle = engine.submit(request, sink=events.put)
    clean: Any = printable if sys.stdout.isatty() else str
    aborted = False
    while True:
        if interrupts.wanted and not aborted:
            handle.abort()
            aborted = True
        try:
            event = events.get(timeout=0.1)  # a signal does not wake a thread that waits for ever on every platform
        except queue.Empty:
            continue
        sys.stdout.write(clean(event.text))
        if event.result is not None:
            break
        sys.stdout.flush()
    print(flush=True)
    return event.result


def _report(result: Result, paced: str) -> None:
    count = len(result.tokens)
    parts = [f"{result.prompt_tokens} prompt tokens", f"{count} tokens", str(result.finish_reason)]
    if result.ttft_s is not None:
        parts.append(f"first after {result.ttft_s:.2f} s")
        if count > 1:
            parts.append(f"{(count - 1) / max(result.latency_s - result.ttft_s, 1e-9):.0f} tok/s")
    parts += [paced] if paced else []
    print(f"[{', '.join(parts)}]", file=sys.stderr)
