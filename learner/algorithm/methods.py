"""Published methods as settings: PPO, GRPO, DAPO and others.

`nyala up --method` turns one into overrides; `nyala losses` lists them. A method has only the
choices that define it: learning rates, batch sizes and the like belong to the run. Where the paper
of a surrogate has bounds of its own (`clip_low`, `clip_high`), they are the surrogate's defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from configs.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Method:
    """A published method and its settings."""

    name: str
    settings: Mapping[str, object]
    """`TABLE.KEY` -> value, as `nyala up --set` takes them."""
    note: str
    source: str


def _method(
    name: str,
    note: str,
    source: str,
    *,
    others: Mapping[str, object] | None = None,
    **algorithm: object,
) -> Method:
    settings = {f"algorithm.{key}": value for key, value in algorithm.items()}
    return Method(name, settings | dict(others or {}), note, source)


HEAD: Mapping[str, object] = {"critic.kind": "head"}

METHODS = (
    _method(
        "PPO",
        "Clipped ratios about mu, advantages of a critic.",
        "Schulman et al. 2017, arXiv:1707.06347",
        advantage="gae",
        correction="none",
        surrogate="clip",
        clip_high=0.2,
        others=HEAD,
    ),
    _method(
        "IMPALA",
        "V-trace: truncated ratios in the critic's targets and in the advantages, no trust region.",
        "Espeholt et al. 2018, arXiv:1802.01561",
        advantage="vtrace",
        correction="none",
        surrogate="reinforce",
        proximal="recomputed",
        others=HEAD,
    ),
    _method(
        "GRPO",
        "PPO's clip with a group in the place of the critic; its KL is `kl_coefficient: 0.04`.",
        "Shao et al. 2024, arXiv:2402.03300",
        advantage="grpo",
        correction="none",
        surrogate="clip",
        clip_high=0.2,
        aggregation="sequence",
    ),
    _method(
        "Dr.GRPO",
        "GRPO without the two divisions that favour easy prompts and long wrong answers.",
        "Liu et al. 2025, arXiv:2503.20783",
        advantage="dr_grpo",
        correction="none",
        surrogate="clip",
        clip_high=0.2,
        aggregation="dr_grpo",
    ),
    _method(
        "DAPO",
        "GRPO with clip-higher, token mean and dynamic sampling, by correctness where the "
        "environment's own score is trained; soft overlong punishment is "
        "`rewards.overlong_buffer_tokens`.",
        "Yu et al. 2025, arXiv:2503.14476",
        advantage="grpo",
        correction="none",
        surrogate="clip",
        clip_high=0.28,
        aggregation="token",
        filter_zero_variance=True,
        filter_metric="accuracy",
    ),
    _method(
        "GSPO",
        "One ratio for a whole episode, clipped a thousand times tighter.",
        "Zheng et al. 2025, arXiv:2507.18071",
        advantage="grpo",
        correction="none",
        surrogate="gspo",
        aggregation="sequence",
    ),
    _method(
        "GMPO",
        "The geometric mean of clipped token ratios.",
        "Zhao et al. 2025, arXiv:2507.20673",
        advantage="grpo",
        correction="none",
        surrogate="gmpo",
        aggregation="sequence",
    ),
    _method(
        "CISPO",
        "Clipped weights instead of clipped gradients.",
        "MiniMax 2025, arXiv:2506.13585",
        advantage="grpo",
        correction="none",
        surrogate="cispo",
        aggregation="token",
    ),
    _method(
        "M2PO",
        "A bound on the second moment of the log-ratios of an optimizer step.",
        "Zheng et al. 2025, arXiv:2510.01161",
        advantage="grpo",
        correction="none",
        surrogate="m2po",
        aggregation="token",
    ),
    _method(
        "DPPO",
        "Masks by the divergence of a token's probability; `dppo_kl` is its other form.",
        "Qi et al. 2026, arXiv:2602.04879",
        advantage="grpo",
        correction="none",
        surrogate="dppo_tv",
        aggregation="token",
    ),
    _method(
        "TOPR",
        "Good episodes as they are, bad ones tapered by the ratio of the episode.",
        "Le Roux et al. 2025, arXiv:2503.14286",
        advantage="dr_grpo",
        correction="none",
        surrogate="topr",
        aggregation="sequence_sum",
    ),
    _method(
        "RLOO",
        "REINFORCE with the group's others as the baseline.",
        "Ahmadian et al. 2024, arXiv:2402.14740",
        advantage="rloo",
        correction="none",
        surrogate="reinforce",
        aggregation="sequence_sum",
    ),
    _method(
        "REINFORCE++",
        "PPO's clip without a critic and without groups; its KL is `kl_in: reward`.",
        "Hu et al. 2025, arXiv:2501.03262",
        advantage="reinforce_pp",
        correction="none",
        surrogate="clip",
        clip_high=0.2,
        aggregation="token",
    ),
    _method(
        "GPG",
        "The plain policy gradient, rescaled for the share of groups of equal rewards.",
        "Chu et al. 2025, arXiv:2504.02546",
        advantage="gpg",
        correction="none",
        surrogate="reinforce",
        aggregation="token",
    ),
    _method(
        "decoupled PPO",
        "The trust region about the policy at the beginning of the batch, prox/mu as a weight.",
        "Fu et al. 2025 (AReaL), arXiv:2505.24298",
        advantage="grpo",
        correction="tis",
        surrogate="clip",
        clip_high=0.2,
        proximal="recomputed",
        num_minibatches=4,
    ),
    _method(
        "A-3PO",
        "Decoupled, with the proximal policy interpolated instead of recomputed.",
        "arXiv:2512.06547",
        advantage="grpo",
        correction="tis",
        surrogate="clip",
        proximal="interpolated",
    ),
    _method(
        "IcePop",
        "Decoupled, with tokens left out whose prox/mu is out of bounds on either side.",
        "Ling Team 2025, arXiv:2510.18855",
        advantage="grpo",
        correction="icepop",
        surrogate="clip",
        proximal="recomputed",
    ),
    _method(
        "verl's rejection",
        "Decoupled, with episodes left out by their geometric mean ratio, or by `token_veto`.",
        "verl, rollout correction",
        advantage="grpo",
        correction="geo_mask",
        surrogate="clip",
        proximal="recomputed",
    ),
    _method(
        "OPD",
        "On-policy distillation: each token is rewarded by log(teacher/pi), and nothing else is; "
        "the teacher is `algorithm.teacher`. The paper has the plain ratio.",
        "Lu and Thinking Machines Lab 2025, On-Policy Distillation",
        advantage="none",
        correction="tis",
        surrogate="clip",
        aggregation="token",
    ),
)


def overrides_of(name: str) -> list[str]:
    """Write a method, in any case of letters, as overrides `TABLE.KEY=VALUE` with values in JSON.

    Raises:
        SettingsError: No method has this name.
    """
    for method in METHODS:
        if method.name.casefold() == name.casefold():
            return [f"{key}={json.dumps(value)}" for key, value in method.settings.items()]
    names = ", ".join(method.name for method in METHODS)
    raise SettingsError(
        f"--method must be one of {names}, got {name!r}; choose one: `nyala losses` describes them"
    )
