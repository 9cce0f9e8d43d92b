"""A core that dies of some requests: `python -m tests.dying_core` where `python -m headrace.core` would run.

Policy, loop and messages are the real ones; in place of a device stands a `ScriptedRunner`, whose tokens follow from
the tokens before them. It starts at once, and a step takes STEP_S. A sequence whose first token is DEADLY kills the
process when it has as many tokens as its second token says.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace

from headrace import core
from headrace.engine.plan import Plan, Sampled, StepResult

DEADLY = 250
STEP_S = 0.005

KERNELS = SimpleNamespace(
    name="scripted", device="cpu", dtype="float32", threads=1, weight_bytes=1, kv_cache_dtype="float32"
)


class ScriptedRunner:
    def __init__(self, files, kernels, *_) -> None:
        self.files = files
        self.kernels = kernels
        self._tokens: dict[int, list[int]] = {}

    def load(self, *arguments) -> None:
        pass

    def allocate_kv_cache(self, *arguments) -> None:
        pass

    def execute(self, plan: Plan) -> StepResult:
        for seq_id in plan.dropped:
            self._tokens.pop(seq_id, None)
        for new in plan.new:
            self._tokens[new.seq_id] = list(new.token_ids)
        time.sleep(STEP_S)
        sampled = []
        for step in plan.steps:
            tokens = self._tokens[step.seq_id]
            if tokens[0] == DEADLY and step.start + step.num_tokens >= tokens[1]:
                os.kill(os.getpid(), signal.SIGKILL)
            if step.samples:
                tokens.append((31 * sum(tokens) + len(tokens)) % 200)
                sampled.append(Sampled(step.seq_id, (tokens[-1],)))
        return StepResult(plan.step, STEP_S, tuple(sampled))


def main() -> int:
    core.Runner = ScriptedRunner
    core.choose_kernels = lambda *arguments: KERNELS
    return core.main()


if __name__ == "__main__":
    sys.exit(main())
