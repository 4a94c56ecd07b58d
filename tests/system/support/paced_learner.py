"""A learner whose batches take a while more, and whose fleet may change every few seconds.

`python -m tests.system.support.paced_learner SECONDS --config FILE`: otherwise as `python -m
learner`. Without it a fleet would have to be watched for half an hour.
"""

from __future__ import annotations

import sys
import time
from typing import Any
from unittest import mock

from configs import fleet
from learner import __main__ as process
from learner import loop
from learner.training.step import train_batch

MORE_AFTER_S, FEWER_AFTER_S, WINDOW_S = 10.0, 20.0, 12.0


def main(seconds: float, arguments: list[str]) -> int:
    """Train, at this pace."""
    fleet.MORE_AFTER_S, fleet.FEWER_AFTER_S = MORE_AFTER_S, FEWER_AFTER_S
    fleet.WINDOW_S = WINDOW_S

    def paced(*given: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return train_batch(*given, **named)

    mock.patch.object(loop, "train_batch", paced).start()
    return process.main(arguments)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
