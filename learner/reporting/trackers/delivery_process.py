"""The process that delivers a run to its trackers, beside learner rank 0.

Started by rank 0, which writes the settings as the first line of stdin, and a line whenever the
run's files have grown. The end of stdin is the end of this life of the learner, however it came
about: what is left is delivered, for `END_S` at most, and a finished model for as long as it moves.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog

from configs import durable
from configs.logging import configure_logging
from configs.settings import RunSettings, Settings, TrackerSettings

from .delivery import FOLDER, Delivery
from .mlflow_run import MlflowRun
from .names import parameters_of
from .tensorboard_events import TensorboardEvents
from .tracker import Tracker
from .trackio_run import TrackioRun
from .wandb_run import WandbRun

# --------------------------------------------------------------------------------------------------
# The trackers that the settings name.


def trackers_of(chosen: TrackerSettings, run: RunSettings) -> dict[str, Tracker]:
    """Make the trackers, by their keys in `trackers`; none has begun."""
    trackers: dict[str, Tracker] = {}
    if chosen.tensorboard:
        trackers["tensorboard"] = TensorboardEvents(run.folder)
    if chosen.wandb is not None:
        trackers["wandb"] = WandbRun(chosen.wandb, run)
    if chosen.mlflow is not None:
        trackers["mlflow"] = MlflowRun(chosen.mlflow, run)
    if chosen.trackio is not None:
        trackers["trackio"] = TrackioRun(chosen.trackio, run)
    return trackers


# --------------------------------------------------------------------------------------------------
# The process that delivers a run to its trackers, beside learner rank 0.

log = structlog.get_logger()

FINISHED = b"finished\n"
"""The last line of a run that has finished."""
END_S = 10.0  # for figures and tables: hundreds of requests to a server that answers
STALLED_S = 60.0  # of a transfer of a model: as long as a request may take, and its tries
LOOK_S = 0.2  # between two looks at the threads that have not ended


def main() -> int:
    """Deliver until the learner ends; wait first for the process of the learner's previous life."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of a group: the learner ends this one itself
        signal.signal(number, signal.SIG_IGN)
    settings = Settings.model_validate_json(sys.stdin.buffer.readline())
    configure_logging("learner", run=settings.run.name, incarnation="trackers")
    folder = settings.run.folder
    with _alone(folder):
        deliveries = [
            Delivery(name, tracker, folder, parameters_of(settings))
            for name, tracker in trackers_of(settings.trackers, settings.run).items()
        ]
        for delivery in deliveries:
            delivery.start()
        is_finished = False
        for line in sys.stdin.buffer:
            is_finished = line == FINISHED
            for delivery in deliveries:
                delivery.wake()
        for delivery in deliveries:
            delivery.request_end(is_finished=is_finished)
        _wait(deliveries, keeps_models=is_finished)
    return 0


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for the process of the previous life, which may be delivering its last figures."""
    path = folder / FOLDER / "lock"
    durable.make_folder(path.parent)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _wait(deliveries: Sequence[Delivery], *, keeps_models: bool) -> None:
    """Wait for the threads, and warn of each that has not delivered everything."""
    ended_at = time.monotonic()
    late: list[Delivery] = [*deliveries]
    while late := [delivery for delivery in late if delivery.is_under_way]:
        now = time.monotonic()
        moves = keeps_models and any(now - delivery.progressed_at < STALLED_S for delivery in late)
        if now - ended_at > END_S and not moves:
            break
        late[0].join(LOOK_S)
    for delivery in deliveries:
        figures = {
            "tracker": delivery.name,
            "last_batch": delivery.newest,
            "refused": delivery.refused,
        }
        if delivery.has_got_all:
            log.info("a tracker has received everything", **figures)
        else:
            log.warning("a tracker has not received everything", **figures)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a library's hook at exit may wait for a server that is away
