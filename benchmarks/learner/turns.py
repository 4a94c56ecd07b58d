"""Arms in turns, each in a process of its own: medians of what they measure."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from statistics import median
from typing import NamedTuple

from benchmarks.support.progress import say_since

ARM_TIMEOUT_S = 900


class Arm(NamedTuple):
    """One measurement: its name in the result, and what its process calls."""

    name: str
    measure: Callable[..., dict[str, float]]
    arguments: tuple[str | int, ...] = ()


def take_turns(arms: Sequence[Arm], rounds: int) -> dict[str, dict[str, float]]:
    """Run each arm once a round; the medians of its figures."""
    say = say_since(time.monotonic())
    found: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(rounds):
        for arm in arms:
            # Forked, so that it need not import torch again; this process never computes.
            with get_context("fork").Pool(1) as pool:
                figures = pool.apply_async(arm.measure, arm.arguments).get(ARM_TIMEOUT_S)
            for key, value in figures.items():
                found[arm.name][key].append(value)
            say(f"{turn + 1}/{rounds} {arm.name}: {found[arm.name]['cpu_s'][-1]:.2f} s")
    return {
        name: {key: round(median(values), 3) for key, values in figures.items()}
        for name, figures in found.items()
    }
