"""Figures that a report draws over the batches of a run, and what each one means."""

from __future__ import annotations

from dataclasses import dataclass

from learner.training import ratio_bins


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of `metrics.jsonl`."""

    key: str
    label: str
    is_optional: bool = False
    """Left out where it is 0 or absent at all batches."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart."""

    title: str
    note: str
    lines: tuple[Line, ...]
    least: float | None = None
    """A value that the vertical axis includes."""
    most: float | None = None
    is_noisy: bool = False
    """Drawn faintly, with its running mean over it."""


LEARNING = (
    Figure(
        "Sampled reward",
        "Mean over the episodes of each batch; bold, its running mean.",
        (Line("reward_mean", "reward"),),
        is_noisy=True,
    ),
    Figure(
        "Loss",
        "Of the policy, as it was minimised; its level means little, jumps mean much.",
        (Line("loss", "loss"),),
        is_noisy=True,
    ),
    Figure(
        "Entropy",
        "Of the next token under the trained policy, nats. Near 0 nothing new is sampled.",
        (Line("entropy", "entropy"),),
        least=0.0,
    ),
    Figure(
        "Gradient norm",
        "Before clipping.",
        (Line("grad_norm", "norm"),),
        least=0.0,
        is_noisy=True,
    ),
    Figure("Learning rate", "Of the optimizer.", (Line("learning_rate", "lr"),), least=0.0),
    Figure(
        "Completion length",
        "Tokens of an episode.",
        (Line("response_length_mean", "mean"), Line("response_length_max", "longest")),
        least=0.0,
    ),
    Figure(
        "Episodes without a signal",
        "Share of completions that were cut off; groups whose rewards are all equal.",
        (
            Line("response_truncated_fraction", "cut off by the token limit"),
            Line("zero_variance_fraction", "groups of equal rewards"),
        ),
        least=0.0,
    ),
)

OFF_POLICY = (
    Figure(
        "KL divergence",
        "Of the trained policy from the one that sampled, nats a token.",
        (
            Line("kl_pi_mu_k3", "KL(π‖μ)"),
            Line("kl_pi_ref_k3", "KL(π‖reference)", is_optional=True),
        ),
        least=0.0,
    ),
    Figure(
        "Effective sample size",
        "Share of tokens, and of whole episodes, that carry information after reweighting.",
        (
            Line("effective_sample_size", "tokens"),
            Line("sequence_effective_sample_size", "episodes"),
        ),
        most=1.0,
    ),
    Figure(
        "Clipped tokens",
        "Share of tokens on which a bound of the loss acted.",
        (
            Line("clip_fraction_low", "below the lower bound"),
            Line("clip_fraction_high", "above the upper bound"),
            Line("truncated_fraction", "ratio truncated", is_optional=True),
            Line("mask_fraction_low", "masked, ratio below 1", is_optional=True),
            Line("mask_fraction_high", "masked, ratio above 1", is_optional=True),
        ),
        least=0.0,
    ),
    Figure(
        "Policy lag",
        "Batches between the policy that sampled a token and the one that trains it.",
        (Line("policy_lag_mean", "mean"), Line("policy_lag_max", "largest")),
        least=0.0,
    ),
)

SPEED = (
    Figure(
        "Tokens per second",
        "Generated tokens that reached the learner, by wall time.",
        (Line("tokens_per_s", "tokens/s"),),
        least=0.0,
        is_noisy=True,
    ),
)

PERCENTILES = ("1", "5", "25", "50", "75", "95", "99")

PHASES = (
    ("waiting for episodes", ("wait_s",)),
    ("fetching and packing", ("fetch_s", "pack_s")),
    ("forward", ("prepare_s", "forward_s")),
    ("backward and optimizer", ("backward_s", "clip_s", "optimizer_s")),
    ("weights to actors", ("gather_s",)),
    ("checkpoints, other", ("checkpoint_s", "other_s")),
)
"""Name in the chart -> figures of `metrics.jsonl`, seconds."""

DERIVED = ("tokens_per_s", "zero_variance_fraction")
"""Figures that `derived.py` computes from others."""

KEYS = tuple(
    dict.fromkeys(
        [
            *(
                line.key
                for figure in (*LEARNING, *OFF_POLICY, *SPEED)
                for line in figure.lines
                if line.key not in DERIVED
            ),
            *(f"ratio_percentiles.{percent}" for percent in PERCENTILES),
            *(f"log_ratio_histogram.{name}" for name in ratio_bins.NAMES),
            *(key for _, keys in PHASES for key in keys),
            "completion_tokens",
            "reused_tokens",
            "zero_variance_groups",
            "groups",
            "wall_s",
            "lineage",
        ]
    )
)
"""Of `metrics.jsonl`, to be read."""
