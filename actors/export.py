"""Export of training items with their right answers, for a supervised start.

One JSON object a line: `{"prompt": str, "answer": str | null, "segments": [[text, trained], ...]}`.
Segments follow the prompt in order: the policy's turns (`trained`, each to be followed by the
end-of-turn token) and the observations between them. Held-out items are never written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from actors.chat import read_prompt, text_of
from actors.environments.calls import call, drive, finish, needs_loop
from actors.environments.deadline import call_within
from actors.environments.registry import make_environment
from configs.errors import SettingsError
from configs.settings import RunSettings

TIMEOUT_S = 600.0  # a hundred thousand items take seconds; a generator may be slow, not endless


def export(
    run: RunSettings, out: Path, *, count: int, seed: int, needs_answers: bool = True
) -> int:
    """Write `count` demonstrations to `out`, which is complete once it exists.

    Args:
        run: Names the environment.
        out: The file.
        count: Items to write.
        seed: Where among the training items to begin; RL begins at item 0.
        needs_answers: There is a supervised start; else only the characters matter.

    Raises:
        SettingsError: The environment cannot be made, or has no demonstrations.
        DeadlineError: It takes too long.
    """

    def write() -> int:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_name(f".{out.name}.{os.getpid()}")
        with unfinished.open("w", encoding="utf-8") as file:
            num_lines = sum(
                file.write(line) > 0 for line in _lines(run, count, seed, needs_answers)
            )
        unfinished.replace(out)
        return num_lines

    return call_within(TIMEOUT_S, write, what="export of run.environment")


def _lines(run: RunSettings, count: int, seed: int, needs_answers: bool) -> Iterator[str]:
    mixture, alone = run.mixture, run.by_environment
    environments = [make_environment(each) for each in alone.values()]
    for number in range(seed * count, (seed + 1) * count):
        place = mixture.training(number)
        environment = environments[place.environment]
        begin = environment.begin
        work = call(begin, place.item, seed, held_out=False, limit_s=TIMEOUT_S)
        conversation = finish(work) if needs_loop(environment, begin) else drive(work)
        segments = conversation.demonstration
        if needs_answers and not segments:
            raise SettingsError(
                f"run.environment must know right answers for a supervised start, got none from "
                f"{list(alone)[place.environment]}; set learner.warm_start_steps to 0"
            )
        fields = {
            "prompt": text_of(read_prompt(conversation.prompt)),
            "answer": conversation.answer,
            "segments": [list(segment) for segment in segments],
        }
        yield json.dumps(fields, ensure_ascii=False) + "\n"
