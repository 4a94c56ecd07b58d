"""Number of ranks that this machine can run: fewer than asked for where GPUs are gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from configs.errors import SettingsError
from configs.settings import LearnerSettings, Settings
from configs.validation.parallel import layout_of

COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
COUNT_S = 120.0  # torch is imported, and the driver may have to be woken


def fits_of(settings: Settings) -> Callable[[int], bool]:
    """Return what says whether so many ranks can be divided as `parallel` says."""

    def fits(ranks: int) -> bool:
        try:
            layout_of(settings.parallel, ranks)
        except SettingsError:
            return False
        return True

    return fits


def usable_ranks(learner: LearnerSettings, fits: Callable[[int], bool] = lambda _: True) -> int:
    """Count the ranks that can be started here; fewer than asked only with `learner.min_ranks`.

    Args:
        learner: Says how many there should be, and on what.
        fits: Whether so many can be divided as `parallel` says.

    Raises:
        SettingsError: They are too few.
    """
    least = learner.min_ranks
    if least is None or learner.device == "cpu":
        return learner.ranks
    gpus = _count_gpus()
    if not gpus and learner.device == "auto":
        return learner.ranks
    for ranks in range(min(gpus, learner.ranks), 0, -1):
        if ranks >= least and fits(ranks):
            return ranks
    raise SettingsError(
        f"learner.min_ranks must be <= the GPUs that work here = {gpus}, and a number that "
        f"parallel divides, got {least}; repair the others, or lower it"
    )


def _count_gpus() -> int:
    counted = subprocess.run(
        [sys.executable, "-c", COUNT_GPUS],
        capture_output=True,
        text=True,
        timeout=COUNT_S,
        check=False,
    )
    return int(counted.stdout) if counted.returncode == 0 else 0
