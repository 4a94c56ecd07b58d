"""One life of supervised training, in a fork: to its end, or to a signal behind a step."""

from __future__ import annotations

import os
from pathlib import Path

from tests.learner.support.forks import run_in_fork

PATIENCE_S = 120


def live(
    folder: Path, *, number: int = 0, behind: int = 0, code: int = 0, changes: tuple[str, ...] = ()
) -> None:
    """Run `python -m learner sft` for the config.yaml and the demonstrations in a folder.

    Args:
        folder: Where they are.
        number: A signal that the process sends itself.
        behind: The step behind which it does.
        code: The exit code that it must have.
        changes: Further arguments of the command.
    """
    run_in_fork(_live, folder, number, behind, code, changes, within_s=PATIENCE_S)


def _live(folder: Path, number: int, behind: int, code: int, changes: tuple[str, ...]) -> None:
    if pid := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
        return
    from learner.__main__ import main
    from learner.sft import SupervisedRun
    from learner.supervised import SupervisedStep

    finish_step = SupervisedRun._finish_step

    def finish_and_signal(run: SupervisedRun, trained: SupervisedStep) -> None:
        finish_step(run, trained)
        if trained.step == behind:
            run._checkpoints.under_way.wait()
            os.kill(os.getpid(), number)

    SupervisedRun._finish_step = finish_and_signal  # type: ignore[assignment, method-assign]
    files = ("--config", folder / "config.yaml", "--demonstrations", folder / "demonstrations")
    os._exit(main(["sft", *map(str, files), *changes]))
