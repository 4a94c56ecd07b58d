"""From the rewards of a group to one advantage for each of its episodes.

Adding one = a function here and a line in `ADVANTAGES`. Sums run in float64 on the CPU: a batch has
at most thousands of rewards.

Shapes: G episodes of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Advantage = Callable[[Float64], Float64]

# Keeps a group whose rewards differ by rounding alone from being blown up to unit variance.
STD_FLOOR = 1e-4


def grpo(rewards_G: Float64) -> Float64:
    """Centre the rewards of a group and divide by their sample standard deviation.

    Source:
        Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    """
    if len(rewards_G) < 2:
        return np.zeros_like(rewards_G)
    centred_G = rewards_G - np.mean(rewards_G)
    return np.asarray(centred_G / (np.std(rewards_G, ddof=1) + STD_FLOOR))


def dr_grpo(rewards_G: Float64) -> Float64:
    """Centre the rewards of a group; without the division, easy and hard prompts weigh alike.

    Source:
        Liu et al. 2025, arXiv:2503.20783, section 3.2.
    """
    return np.asarray(rewards_G - np.mean(rewards_G))


def rloo(rewards_G: Float64) -> Float64:
    """Subtract from each reward the mean of the group's other rewards.

    Source:
        Ahmadian et al. 2024, arXiv:2402.14740, section 2.3.
    """
    num_episodes = len(rewards_G)
    if num_episodes < 2:
        return np.zeros_like(rewards_G)
    return np.asarray((rewards_G - np.mean(rewards_G)) * num_episodes / (num_episodes - 1))


ADVANTAGES: Mapping[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
