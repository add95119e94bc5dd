"""The command line on the toy model: `python -m tests.support.cli_fake STEP_S INTERRUPT_AT ARGUMENTS...`.

INTERRUPT_AT lists the steps (with commas) at which the process sends itself a Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys

import shoal.cli.console
import shoal.engine.loading
from shoal.runners.fake import ByteTokenizer, FakeRunner
from shoal.runners.plan import StepPlan


class WordTokenizer(ByteTokenizer):
    """Bytes as before, but printable ones: the toy model writes letters."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([97 + token % 26]) if token < 256 else b""


def opened(step_s: float = 0.0, interrupt_at: tuple[int, ...] = ()) -> shoal.engine.loading.OpenedModel:
    """What `open_model` gives, with the toy model in it."""

    def fault(plan: StepPlan) -> None:
        if plan.step in interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)

    return shoal.engine.loading.OpenedModel(WordTokenizer(), lambda: FakeRunner(step_s=step_s, fault=fault))


def main() -> None:
    step_s, at, *arguments = sys.argv[1:]
    made = opened(float(step_s), tuple(int(step) for step in at.split(",") if step))
    shoal.engine.loading.open_model = lambda *_, **__: made
    shoal.cli.console.ensure_model = lambda model: None
    sys.argv = ["shoal", *arguments]
    from shoal.cli.main import main

    main()


if __name__ == "__main__":
    main()
