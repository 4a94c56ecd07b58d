"""Advantages of a batch's episodes, from their rewards.

    advantage = whitening(estimate(rewards, lengths, groups))

Rank 0 computes them when it plans a batch; they are a pure function of its episodes, so a replayed
batch gets the same bytes. Adding one = a function here and a line in `ADVANTAGES`, and a line in
`WHITENED_BY` if its paper whitens. Sums run in float64: a batch has at most thousands of rewards.
Advantages that differ from token to token need the policy or a critic; the plan carries the plain
reward for them.

Shapes: E episodes of a batch, G episodes of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import comb

import numpy as np
import numpy.typing as npt

from configs.settings import AlgorithmSettings

# --------------------------------------------------------------------------------------------------
# Rewards of a batch's episodes with their statistics by group, and whitening of advantages.
#
# Whitening brings advantages to mean 0 and standard deviation 1 over a named scope. Adding a scope
# = a function here, a line in `WHITENINGS`, and its name in `algorithm.whiten`.
#
# Shapes: E episodes of a batch.

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BatchRewards:
    """Rewards, lengths and groups of a batch's episodes, in the order of the batch."""

    rewards_E: Float64
    """Shaped rewards."""
    lengths_E: Float64
    """Trained tokens; 0 for an episode that overlong filtering took out."""
    groups_E: Int64
    """Index of each episode's group: 0, 1, ..."""

    @property
    def sizes_E(self) -> Float64:
        """Members of each episode's group. Shape [E]."""
        return self.group_sum(np.ones_like(self.rewards_E))

    def group_sum(self, values_E: Float64) -> Float64:
        """Sum over each episode's group. Shape [E]."""
        sums = np.bincount(self.groups_E, values_E).astype(np.float64)
        return sums[self.groups_E]

    def group_mean(self, values_E: Float64) -> Float64:
        """Average over each episode's group. Shape [E]."""
        return self.group_sum(values_E) / self.sizes_E

    def rows_by_group(self) -> list[Int64]:
        """List the rows of each group."""
        num_groups = int(self.groups_E.max(initial=-1)) + 1
        return [np.flatnonzero(self.groups_E == group) for group in range(num_groups)]


Whitening = Callable[[Float64, BatchRewards], Float64]

# Keeps a group whose rewards differ by rounding alone from being blown up to unit variance.
STD_FLOOR = 1e-4


def leave_plain(advantages_E: Float64, _outcomes: BatchRewards) -> Float64:
    """Return the advantages unchanged."""
    return advantages_E


def whiten_group(advantages_E: Float64, outcomes: BatchRewards) -> Float64:
    """Bring each group to mean 0 and sample standard deviation 1, over its episodes."""
    centred_E = advantages_E - outcomes.group_mean(advantages_E)
    variance_E = outcomes.group_sum(centred_E**2) / np.maximum(1, outcomes.sizes_E - 1)
    return np.asarray(centred_E / (np.sqrt(variance_E) + STD_FLOOR))


def whiten_batch(advantages_E: Float64, outcomes: BatchRewards) -> Float64:
    """Bring the batch to mean 0 and standard deviation 1, over its trained tokens.

    Over tokens, as for advantages that differ from token to token: an episode counts as often as
    the loss sees it.
    """
    shares_E = outcomes.lengths_E / max(1.0, float(outcomes.lengths_E.sum()))
    centred_E = advantages_E - shares_E @ advantages_E
    return np.asarray(centred_E / (np.sqrt(shares_E @ centred_E**2) + STD_FLOOR))


WHITENINGS: Mapping[str, Whitening] = {
    "none": leave_plain,
    "group": whiten_group,
    "batch": whiten_batch,
}


# --------------------------------------------------------------------------------------------------
# Advantages of a batch's episodes, from their rewards.

Advantage = Callable[[BatchRewards, AlgorithmSettings], Float64]


def estimate(outcomes: BatchRewards, settings: AlgorithmSettings) -> Float64:
    """Compute the advantages of a batch under the settings. Shape [E]."""
    advantages_E = ADVANTAGES[settings.advantage](outcomes, settings)
    scope = settings.whiten or WHITENED_BY.get(settings.advantage, "none")
    return WHITENINGS[scope](advantages_E, outcomes)


def grpo(outcomes: BatchRewards, _settings: AlgorithmSettings) -> Float64:
    """Centre the rewards of a group, which whitening by group divides by their deviation.

    Formula:
        (r - mean r) / std r

    Use:
        The usual start: several answers to each prompt and no critic.

    Source:
        Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    """
    return outcomes.rewards_E - outcomes.group_mean(outcomes.rewards_E)


def dr_grpo(outcomes: BatchRewards, _settings: AlgorithmSettings) -> Float64:
    """Centre the rewards of a group: nearly solved and nearly hopeless prompts do not weigh more.

    Formula:
        r - mean r

    Use:
        Prompts differ much in difficulty, or answers grow long; with `aggregation: dr_grpo`.

    Source:
        Liu et al. 2025, arXiv:2503.20783, section 3.2.
    """
    return outcomes.rewards_E - outcomes.group_mean(outcomes.rewards_E)


def rloo(outcomes: BatchRewards, _settings: AlgorithmSettings) -> Float64:
    """Subtract from each reward the mean of the group's others: a baseline without bias.

    Formula:
        (r - mean r) n / (n - 1)

    Use:
        Groups are small, from 2 on, and the size of the gradient should not depend on theirs.

    Source:
        Ahmadian et al. 2024, arXiv:2402.14740, section 2.3.
    """
    sizes_E = outcomes.sizes_E
    centred_E = outcomes.rewards_E - outcomes.group_mean(outcomes.rewards_E)
    return np.asarray(centred_E * sizes_E / np.maximum(1, sizes_E - 1))


def reinforce_pp(outcomes: BatchRewards, _settings: AlgorithmSettings) -> Float64:
    """Take the reward itself; whitening by batch is the only baseline.

    Formula:
        (r - mean r) / std r, over the tokens of the batch

    Use:
        One answer for each prompt, or prompts that are alike.

    Source:
        Hu et al. 2025, arXiv:2501.03262, REINFORCE++ (its KL term is subtracted token by token).
    """
    return outcomes.rewards_E


def reinforce_pp_baseline(outcomes: BatchRewards, _settings: AlgorithmSettings) -> Float64:
    """Centre the rewards of a group; whitening by batch scales all groups alike.

    Formula:
        (r - mean r) / std, over the tokens of the batch

    Use:
        Groups are small, so that their own deviations are mostly noise.

    Source:
        Hu et al. 2025, arXiv:2501.03262, REINFORCE++-baseline.
    """
    return outcomes.rewards_E - outcomes.group_mean(outcomes.rewards_E)


def gpg(outcomes: BatchRewards, _settings: AlgorithmSettings) -> Float64:
    """Centre the rewards of a group and compensate for groups of equal rewards.

    M of the batch's E episodes are in groups of equal rewards: their zeros would make the average
    gradient of the batch the smaller, the more there are.

    Formula:
        (r - mean r) E / (E - M)

    Use:
        Many groups are all right or all wrong, and `filter_zero_variance` would sample too much.

    Source:
        Chu et al. 2025, arXiv:2504.02546 (F_norm = 1, alpha = B / (B - M)).
    """
    centred_E = outcomes.rewards_E - outcomes.group_mean(outcomes.rewards_E)
    rewards_by_group = (outcomes.rewards_E[rows] for rows in outcomes.rows_by_group())
    num_idle = sum(len(rewards_G) for rewards_G in rewards_by_group if np.ptp(rewards_G) == 0)
    return centred_E * len(centred_E) / max(1, len(centred_E) - num_idle)


def opo(outcomes: BatchRewards, _settings: AlgorithmSettings) -> Float64:
    """Subtract the group's mean reward, weighted by length.

    That is the baseline of least variance where the squared gradient of an episode grows with its
    length.

    Formula:
        r - sum(l r) / sum l

    Use:
        Lengths differ much within a group, training is near on-policy.

    Source:
        Hao et al. 2025, arXiv:2505.23585 (practical optimal baseline).
    """
    weights_E = outcomes.lengths_E
    untrained_E = outcomes.group_sum(weights_E) == 0  # any baseline does: nothing is trained
    weights_E = np.where(untrained_E, 1.0, weights_E)
    weighted_E = outcomes.group_sum(weights_E * outcomes.rewards_E)
    return outcomes.rewards_E - weighted_E / outcomes.group_sum(weights_E)


def pass_at_k(outcomes: BatchRewards, settings: AlgorithmSettings) -> Float64:
    """Reward what an episode adds to the best of k = `pass_k`, S being all sets of k members.

    For rewards 0 and 1 that is the paper's closed form: with c of n right, p = 1 - C(n-c, k) /
    C(n, k) is pass@k, a right answer gets (1 - p) / sqrt(p (1 - p)) and a wrong one
    (1 - p - C(n-c-1, k-1) / C(n-1, k-1)) / sqrt(p (1 - p)). At k = 1 it is GRPO.

    Formula:
        (E[max S given i in S] - E[max S]) / std[max S]

    Use:
        Answers will be tried k at a time, or exploration has died: it pays for rare successes.

    Source:
        Chen et al. 2025, arXiv:2508.10751 (analytical derivation); other rewards by
        the order statistics of Walder & Karkhanis 2025, arXiv:2505.15201.
    """
    advantages_E = np.zeros_like(outcomes.rewards_E)
    for rows in outcomes.rows_by_group():
        k = min(settings.pass_k, len(rows))  # a group may have lost members
        advantages_E[rows] = _best_of_k(outcomes.rewards_E[rows], k)
    return advantages_E


def gae(outcomes: BatchRewards, _settings: AlgorithmSettings) -> Float64:
    """Weigh the temporal differences that follow a token, with the values of a critic.

    delta_t = r_t + gamma V(x_(t+1)) - V(x_t). What is planned here is the plain reward;
    `token_advantages.py` makes advantages of it. Reads `critic.gamma` and `critic.lam`.

    Formula:
        sum over l of (gamma lambda)^l delta_(t+l)

    Use:
        There is one answer for each prompt, or long answers whose tokens deserve credit of their
        own, and a critic can be paid for. It leaves pi/mu to the correction.

    Source:
        Schulman et al. 2016, arXiv:1506.02438, equation 16.
    """
    return outcomes.rewards_E


def vtrace(outcomes: BatchRewards, _settings: AlgorithmSettings) -> Float64:
    """Weigh the temporal difference to the next V-trace target v by pi/mu.

    What is planned here is the plain reward; `token_advantages.py` makes advantages of it. Reads
    `critic.gamma`, `critic.rho_bar` and `critic.c_bar`.

    Formula:
        min(critic.rho_bar, pi/mu) (r_t + gamma v_(t+1) - V(x_t))

    Use:
        As `gae`, and the data is older than a batch or two: it corrects the critic's targets too.
        With `critic.kind: model`, as truncated ratios do not cancel the errors of a head.

    Source:
        Espeholt et al. 2018, arXiv:1802.01561, section 4.2.
    """
    return outcomes.rewards_E


def none(outcomes: BatchRewards, _settings: AlgorithmSettings) -> Float64:
    """Leave the reward out, so that everything is learned from `algorithm.teacher`.

    Formula:
        0

    Use:
        Distillation alone. The reward is still computed, shown and evaluated.

    Source:
        Lu and Thinking Machines Lab 2025, "On-Policy Distillation".
    """
    return np.zeros_like(outcomes.rewards_E)


ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gpg": gpg,
    "opo": opo,
    "pass_at_k": pass_at_k,
    "gae": gae,
    "vtrace": vtrace,
    "none": none,
}
WHITENED_BY: Mapping[str, str] = {
    "grpo": "group",
    "reinforce_pp": "batch",
    "reinforce_pp_baseline": "batch",
}
"""Scope that the paper of an advantage whitens over; the others do not whiten."""


def _best_of_k(rewards_G: Float64, k: int) -> Float64:
    """Compare the best of k with and without each member in it, from the k-subsets' maxima."""
    n = len(rewards_G)
    order_G = np.argsort(rewards_G, kind="stable")
    sorted_G = rewards_G[order_G]
    # Share of all sets whose best is the j-th lowest: the others are among the j lower ones.
    is_best_G = np.array([comb(j, k - 1) / comb(n, k) for j in range(n)])
    mean = is_best_G @ sorted_G
    std = np.sqrt(is_best_G @ (sorted_G - mean) ** 2)
    # Share of the sets with a given member whose best is the j-th lowest, above that member.
    with_G = [comb(j - 1, k - 2) / comb(n - 1, k - 1) if j and k > 1 else 0.0 for j in range(n)]
    above_G = np.append(np.cumsum((with_G * sorted_G)[::-1])[::-1][1:], 0.0)
    own_G = np.array([comb(j, k - 1) / comb(n - 1, k - 1) for j in range(n)]) * sorted_G
    advantages_G = np.empty_like(rewards_G)
    advantages_G[order_G] = (own_G + above_G - mean) / (std + STD_FLOOR)
    return advantages_G
