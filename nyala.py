"""Nyala from Python, in a script or a notebook; loads neither torch nor vLLM.

    import nyala

    run = nyala.create_run("mine.yaml", learner={"lr": 1e-6})
    run.wait()
    print(run.summary["held_out_accuracy_after"], run.model_path)

Sampling and training happen in processes of their own, as those of the command `nyala up` do.
"""

from configs.errors import NyalaError, SettingsError
from console.api import Run, create_run, open_run

__all__ = ["NyalaError", "Run", "SettingsError", "create_run", "open_run"]
