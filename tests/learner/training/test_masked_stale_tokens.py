"""Gradients and figures of a batch with stale tokens, against a reference that leaves them out.

The reference is written out by hand in float64: it reads each episode alone, with transformers' own
forward pass, and has a list of the fresh tokens in place of masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from buffer.operations.values import StaleMask
from buffer.record.episode import Episode, PolicyVersion
from configs.settings import AlgorithmSettings, CriticSettings
from learner.data.batch import pack, plan_batch
from learner.data.policy_lag import mask_stale
from learner.model.ranks import Ranks
from learner.training.critic import Critic, ValueModel
from learner.training.divergence import Divergence, DivergenceMeter
from learner.training.optimizer import ScheduledOptimizer
from learner.training.preparation import prepare
from learner.training.step import accumulate
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.padded import StayWide
from tests.learner.support.tiny_policy import tiny_causal_lm, tiny_policy

STEP, MAX_LAG = 6, 1
STALE, FRESH, NEWEST = (PolicyVersion(1, step) for step in (3, 4, 5))
WIDTH = 32


@dataclass(frozen=True)
class Made:
    """An episode, and which of its completion tokens are fresh and sampled."""

    episode: Episode
    fresh: list[int]


def make(
    task_id: int,
    length: int,
    fresh: Sequence[int],
    *,
    versions: Sequence[tuple[PolicyVersion, int]],
    reward: float,
    environment: Sequence[int] = (),
) -> Made:
    """Make an episode of random tokens and log-probs; four make a group."""
    generator = torch.Generator().manual_seed(task_id)
    token_ids = torch.randint(3, 20, (length,), generator=generator).tolist()
    logprobs = (-3.5 + torch.rand(length, generator=generator)).tolist()
    mask = [int(place not in environment) for place in range(length)]
    episode = make_episode(
        task_id,
        group_id=task_id // 4,
        prompt=[5, 6, 7 + task_id // 4],
        completion=token_ids,
        logprobs=[value * sampled for value, sampled in zip(logprobs, mask, strict=True)],
        mask=mask,
        reward=reward,
        versions=versions,
    )
    return Made(episode, list(fresh))


BATCH = [
    make(0, 8, [5, 6, 7], versions=[(STALE, 0), (FRESH, 5)], reward=1.0),
    make(1, 4, [], versions=[(STALE, 0)], reward=1.0),
    make(
        2,
        9,
        [0, 1, 6, 8],  # an actor with older weights went on from the third token, and one gave back
        versions=[(NEWEST, 0), (STALE, 2), (NEWEST, 6)],
        reward=0.0,
        environment=[3, 7],
    ),
    make(3, 3, [0, 1, 2], versions=[(NEWEST, 0)], reward=0.0),
    make(4, 6, [0, 1, 2], versions=[(FRESH, 0), (STALE, 3)], reward=1.0),
    make(5, 2, [0, 1], versions=[(FRESH, 0)], reward=0.0),
    make(6, 7, [6], versions=[(STALE, 0), (NEWEST, 6)], reward=0.0),
    make(7, 1, [], versions=[(STALE, 0)], reward=0.0),
]
ADVANTAGES = [0.5, 0.5, -0.5, -0.5, 0.75, -0.25, -0.25, -0.25]
"""Rewards less the mean over all members of the group, wholly stale ones included."""
NUM_FRESH = sum(len(made.fresh) for made in BATCH)
NUM_EPISODES = sum(1 for made in BATCH if made.fresh)


# --------------------------------------------------------------------------------------------------
# What the learner computes.


def learn(
    algorithm: AlgorithmSettings, ranks: Ranks, critic: CriticSettings | None = None
) -> tuple[float, dict[str, Tensor], Divergence]:
    """Loss, gradients by parameter, and figures of the masked batch."""
    policy, judge = tiny_policy().double(), None
    if critic is not None:
        values = ValueModel(WIDTH, None, trunk_gradient=critic.trunk_gradient).double()
        fill_head(values.head)
        judge = Critic(values, cast("ScheduledOptimizer", None), critic)
    episodes = mask_stale(
        [made.episode for made in BATCH],
        StaleMask(1, MAX_LAG, MAX_LAG),
        step=STEP,
        lineages={1: 0},
        reused=(),
    )
    plan = plan_batch(
        STEP,
        episodes,
        ranks=1,
        settings=algorithm,
        max_completion_tokens=9,
        microbatch_tokens=40,
    )
    own = {*plan.task_ids_of(0)}
    trained = [episode for episode in episodes if episode.task_id in own]
    microbatches = pack(plan, trained, settings=algorithm, lineages={1: 0}, lineage=1)
    assert len(microbatches) > 1
    assert sum(len(microbatch.rewards_B) for microbatch in microbatches) == NUM_EPISODES
    meter, loss = DivergenceMeter(algorithm, ranks.device), 0.0
    with StayWide():
        prepared = prepare(policy, microbatches, settings=algorithm, ranks=ranks, critic=judge)
        for constants in prepared:
            loss += float(accumulate(policy, constants, meter, algorithm, judge))
    modules = {"": policy.causal_lm} | ({} if judge is None else {"head.": judge.model.head})
    return loss, gradients_of(modules), meter.merge(ranks)


def gradients_of(modules: Mapping[str, torch.nn.Module]) -> dict[str, Tensor]:
    return {
        prefix + name: parameter.grad
        for prefix, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def fill_head(head: torch.nn.Module) -> None:
    """Give a value head the same weights every time."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


# --------------------------------------------------------------------------------------------------
# The reference.


@dataclass(frozen=True)
class Read:
    """The fresh tokens of an episode, each with the whole text before it as context."""

    log_pi: Tensor
    """With gradient. Shape [fresh tokens]."""
    log_mu: Tensor
    entropies: Tensor
    states: Tensor
    """From which a value is read, with gradient. Shape [fresh tokens, width]."""
    advantage: float
    reward: float


class Reference:
    """The same model and value head, and all episodes read one by one."""

    def __init__(self) -> None:
        self.model = tiny_causal_lm().double()
        self.head = ValueModel(WIDTH, None, trunk_gradient=True).double().head
        fill_head(self.head)
        with StayWide():
            self.episodes = [
                self._read(made, advantage)
                for made, advantage in zip(BATCH, ADVANTAGES, strict=True)
                if made.fresh
            ]

    def _read(self, made: Made, advantage: float) -> Read:
        completion = made.episode.completion
        token_ids = torch.tensor([*made.episode.prompt_ids, *completion.token_ids])
        output = self.model(input_ids=token_ids[None], output_hidden_states=True, use_cache=False)
        before = [len(made.episode.prompt_ids) + place - 1 for place in made.fresh]
        log_pi = output.logits[0].log_softmax(-1)
        return Read(
            log_pi=torch.stack([log_pi[place, token_ids[place + 1]] for place in before]),
            log_mu=torch.tensor([float(completion.behaviour_logprobs[t]) for t in made.fresh]),
            entropies=torch.stack([-(log_pi[place].exp() @ log_pi[place]) for place in before]),
            states=output.hidden_states[-1][0, before],
            advantage=advantage,
            reward=made.episode.reward,
        )

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        with StayWide():
            loss.backward()
        return gradients_of({"": self.model, "head.": self.head})


def clip_loss(ref: Reference) -> Tensor:
    """The default, over all fresh tokens alike, with a bonus for their entropy."""
    total = torch.zeros((), dtype=torch.float64)
    for read in ref.episodes:
        for log_pi, log_mu, entropy in zip(read.log_pi, read.log_mu, read.entropies, strict=True):
            ratio = (log_pi - log_mu).exp()
            if float(ratio.detach()) > 2.0:  # rho_bar: its value stays, its gradient is u dlog(pi)
                ratio = 2.0 * (1 + log_pi - log_pi.detach())
            clipped = ratio.clamp(1 - 0.2, 1 + 0.28) * read.advantage
            total = total + torch.minimum(ratio * read.advantage, clipped) + 0.05 * entropy
    return -total / NUM_FRESH


def gspo_loss(ref: Reference) -> Tensor:
    """The ratio of an episode is the geometric mean over its fresh tokens; episodes weigh alike."""
    total = torch.zeros((), dtype=torch.float64)
    for read in ref.episodes:
        ratio = (read.log_pi - read.log_mu).mean().exp()
        clipped = ratio.clamp(1 - 0.5, 1 + 0.5) * read.advantage
        total = total + torch.minimum(ratio * read.advantage, clipped)
    return -total / NUM_EPISODES


def product_loss(ref: Reference) -> Tensor:
    """Each fresh token weighs the truncated product of the ratios of its episode's fresh tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for read in ref.episodes:
        product = float((read.log_pi - read.log_mu).detach().sum().exp().clamp(max=2.0))
        total = total + product * read.advantage * (1 + read.log_pi - read.log_pi.detach()).sum()
    return -total / NUM_FRESH


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "clip": ({"entropy_bonus": 0.05}, clip_loss),
    "gspo": (
        {
            "surrogate": "gspo",
            "correction": "none",
            "aggregation": "sequence",
            "clip_low": 0.5,
            "clip_high": 0.5,
        },
        gspo_loss,
    ),
    "seq_tis": ({"surrogate": "reinforce", "correction": "seq_tis"}, product_loss),
}


@pytest.mark.parametrize("name", CASES)
def test_stale_tokens_have_no_part_in_the_gradient(name: str, ranks: Ranks) -> None:
    changes, loss_of = CASES[name]
    algorithm = AlgorithmSettings.model_validate({"advantage": "dr_grpo", **changes})
    reference = Reference()
    loss = loss_of(reference)

    found, gradients, _ = learn(algorithm, ranks)

    assert found == pytest.approx(float(loss.detach()), rel=1e-6)
    assert_equal(gradients, reference.gradients(loss))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare up to the float32 of advantages and weights."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        distance = float((found[name] - gradient).abs().max())
        assert distance <= 1e-6 * float(gradient.abs().max()), name


CRITIC = CriticSettings(
    kind="head", trunk_gradient=True, gamma=0.9, lam=0.8, rho_bar=1.5, c_bar=1.1
)


def gae_of(read: Read, values: list[float]) -> tuple[list[float], list[float]]:
    """From fresh token to fresh token; the reward comes with the last one."""
    following = [*values[1:], 0.0]
    advantage, advantages = 0.0, []
    for t in reversed(range(len(values))):
        reward = read.reward if t == len(values) - 1 else 0.0
        delta = reward + 0.9 * following[t] - values[t]
        advantage = delta + 0.9 * 0.8 * advantage
        advantages.append(advantage)
    advantages.reverse()
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def vtrace_of(read: Read, values: list[float]) -> tuple[list[float], list[float]]:
    """The same, with the truncated ratios of fresh tokens alone."""
    ratios = (read.log_pi - read.log_mu).exp().tolist()
    following = [*values[1:], 0.0]
    correction, targets = 0.0, []
    for t in reversed(range(len(values))):
        reward = read.reward if t == len(values) - 1 else 0.0
        delta = min(1.5, ratios[t]) * (reward + 0.9 * following[t] - values[t])
        correction = delta + 0.9 * min(1.1, ratios[t]) * correction
        targets.append(values[t] + correction)
    targets.reverse()
    behind = [*targets[1:], 0.0]
    paid = [0.0] * (len(values) - 1) + [read.reward]
    advantages = [
        min(1.5, ratio) * (reward + 0.9 * v - value)
        for ratio, reward, v, value in zip(ratios, paid, behind, values, strict=True)
    ]
    return advantages, targets


@pytest.mark.parametrize("name", ["gae", "vtrace"])
def test_stale_tokens_are_no_steps_of_a_critics_trajectory(name: str, ranks: Ranks) -> None:
    changes = (
        {"correction": "none", "surrogate": "reinforce", "proximal": "recomputed"}
        if name == "vtrace"
        else {"correction": "none", "surrogate": "reinforce"}
    )
    algorithm = AlgorithmSettings.model_validate({"advantage": name, "whiten": "none", **changes})
    reference = Reference()
    policy_loss = torch.zeros((), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for read in reference.episodes:
        values = reference.head(read.states)[:, 0]
        estimate = gae_of if name == "gae" else vtrace_of
        advantages, targets = estimate(read, values.tolist())
        anchor = read.log_mu if name == "gae" else read.log_pi.detach()
        for t, advantage in enumerate(advantages):
            policy_loss = policy_loss - (read.log_pi[t] - anchor[t]).exp() * advantage / NUM_FRESH
            total = total + 0.5 * (values[t] - targets[t]).square() / NUM_FRESH

    found, gradients, _ = learn(algorithm, ranks, CRITIC)

    assert found == pytest.approx(float(policy_loss.detach()), rel=1e-6)
    assert_equal(gradients, reference.gradients(policy_loss + CRITIC.coefficient * total))


def test_stale_tokens_have_no_part_in_the_figures(ranks: Ranks) -> None:
    algorithm = AlgorithmSettings.model_validate({"advantage": "dr_grpo", "entropy_bonus": 0.05})
    episodes = Reference().episodes
    log_rhos = torch.cat([read.log_pi.detach() - read.log_mu for read in episodes])
    sequences = torch.stack([(read.log_pi.detach() - read.log_mu).sum() for read in episodes])

    _, _, figures = learn(algorithm, ranks)

    entropies = torch.cat([read.entropies.detach() for read in episodes])
    assert figures.entropy == pytest.approx(float(entropies.mean()))
    assert figures.kl_mu_pi_k1 == pytest.approx(-float(log_rhos.mean()))
    assert figures.ratio_max == pytest.approx(float(log_rhos.exp().max()))
    assert figures.sequence_ratio_mean == pytest.approx(float(sequences.exp().mean()))
    assert sum(figures.log_ratio_histogram.values()) == NUM_FRESH
    assert figures.lag0_tokens == 3, "of the fourth alone: two others saw older weights before"
