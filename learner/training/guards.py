"""Guards against divergence: alerts, a lower learning rate, a rollback, the end of the run.

    calm -> skipped -> ... -> skipped (max_skipped_in_a_row) -> rolled back -> calm
                                                             -> DivergedError (after max_rollbacks)

`skipped` is a batch with a skipped optimizer step (loss or gradient not finite); one without calms
the run. A rollback changes weights, moments and the two factors below, never the number of the
batch: what was trained since the checkpoint is not trained again (docs/design.md).

Owns these decisions, and the coefficients that follow a target (KL penalty, entropy bonus). All are
functions of figures merged over ranks, so that every rank decides alike without communication;
their state is part of a checkpoint, so that a resumed run decides alike too. Files, weights and the
store lie elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from configs.errors import DivergedError
from configs.settings import AlgorithmSettings, GuardSettings

from .divergence import Divergence
from .step import BatchOutcome, TrainedBatch

MOST_KL_ERROR = 0.2  # Ziegler et al. 2019: one odd batch must not throw the coefficient
KL_GAIN = 0.1  # the same source


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that needs attention. Producer: `Guard`. Consumer: `BatchLog`."""

    name: str
    """Its name in `alerts` of metrics.jsonl."""
    text: str
    """The finding and the remedy."""


@dataclass(slots=True)
class GuardState:
    """State of the guards from batch to batch; part of each checkpoint."""

    skipped_in_a_row: int = 0
    """Batches with a skipped optimizer step since the last without, or since the last rollback."""
    rollbacks: int = 0
    """Rollbacks of the run so far."""
    restored_step: int | None = None
    """Checkpoint of the last rollback, until a newer one is written: the next rollback goes further
    back."""
    kl_lr_scale: float = 1.0
    """Factor on the learning rate due to `guards.max_kl`."""
    kl_coefficient: float | None = None
    """Present weight of the KL under `algorithm.kl_target`; None before the first batch."""
    entropy_bonus: float | None = None
    """Present weight of the entropy under `algorithm.entropy_target`; None before the first
    batch."""


class Guard:
    """Judges one batch after the other; the same on every rank."""

    def __init__(
        self, bounds: GuardSettings, algorithm: AlgorithmSettings, state: GuardState
    ) -> None:
        self._bounds = bounds
        self._algorithm = algorithm
        self.state = state
        self.has_skipped_step = state.skipped_in_a_row > 0
        """Whether the last batch had a skipped step: its weights are none to roll back to."""

    @property
    def lr_scale(self) -> float:
        """Factor on the schedule's learning rate in the next batch."""
        return self.state.kl_lr_scale * self._bounds.rollback_lr_factor**self.state.rollbacks

    @property
    def algorithm(self) -> AlgorithmSettings:
        """Settings of the next batch, with the present clip bounds and coefficients."""
        state, algorithm = self.state, self._algorithm
        narrowed = self._bounds.rollback_clip_factor**state.rollbacks
        changed = {
            "clip_low": algorithm.clip_low * narrowed,
            "clip_high": algorithm.clip_high * narrowed,
        }
        if algorithm.kl_target is not None and state.kl_coefficient is not None:
            changed["kl_coefficient"] = state.kl_coefficient
        if algorithm.entropy_target is not None and state.entropy_bonus is not None:
            changed["entropy_bonus"] = state.entropy_bonus
        return algorithm.model_copy(update=changed)

    @property
    def must_roll_back(self) -> bool:
        """Whether `max_skipped_in_a_row` batches had a skipped step: the weights are at fault."""
        return self.state.skipped_in_a_row >= self._bounds.max_skipped_in_a_row

    def watch(self, trained: TrainedBatch) -> list[Alert]:
        """Judge a trained batch and adapt the settings of the next one; return what was found.

        A batch with a skipped step is only counted. The caller then rolls back if `must_roll_back`.

        Raises:
            DivergedError: More than `max_rollbacks` rollbacks would be needed.
        """
        self.has_skipped_step = trained.outcome.skipped_steps > 0
        if self.has_skipped_step:
            return self._count_skipped(trained.outcome)
        self.state.skipped_in_a_row = 0
        self._follow_targets(trained.divergence)
        return [*self._check_kl(trained.divergence), *self._check_ratios(trained.divergence)]

    def rolled_back(self, restored_step: int) -> None:
        """Record a rollback to the checkpoint of `restored_step`."""
        self.state.skipped_in_a_row = 0
        self.state.rollbacks += 1
        self.state.restored_step = restored_step

    def checkpoints(self) -> None:
        """Record a new checkpoint; rollbacks use none made after a batch with a skipped step."""
        if not self.has_skipped_step:
            self.state.restored_step = None

    def state_to_save(self) -> GuardState:
        """Return the state for a checkpoint made now; the guard goes on unchanged."""
        return replace(
            self.state, restored_step=self.state.restored_step if self.has_skipped_step else None
        )

    def _count_skipped(self, outcome: BatchOutcome) -> list[Alert]:
        state, bounds = self.state, self._bounds
        state.skipped_in_a_row += 1
        if self.must_roll_back and state.rollbacks == bounds.max_rollbacks:
            raise DivergedError(
                f"training must recover within guards.max_rollbacks = {bounds.max_rollbacks}, got "
                f"{state.skipped_in_a_row} more batches in a row with a skipped step; look at "
                "`alerts`, `grad_norm` and `ratio_max` in metrics.jsonl, then lower learner.lr or "
                "algorithm.rho_bar"
            )
        cause = "loss" if outcome.skipped_for_loss else "gradient"
        alerts = [
            Alert(
                "skipped",
                f"{cause} not finite: {outcome.skipped_steps} of {outcome.optimizer_steps} "
                "optimizer steps left out; look at ratio_max, lower learner.lr if it comes again",
            )
        ]
        if self.must_roll_back:
            alerts.append(
                Alert(
                    "rollback",
                    f"{state.skipped_in_a_row} batches in a row with a skipped step: the weights "
                    "go back to a checkpoint, learning rate and clip bounds are lowered",
                )
            )
        return alerts

    def _check_kl(self, divergence: Divergence) -> list[Alert]:
        """Lower the learning rate while KL(pi || mu) is too large; let it recover afterwards."""
        bounds, kl = self._bounds, divergence.kl_pi_mu_k3
        if bounds.max_kl is None:
            return []
        if kl <= bounds.max_kl:
            self.state.kl_lr_scale = min(1.0, self.state.kl_lr_scale * bounds.kl_lr_recovery)
            return []
        lowered = self.state.kl_lr_scale * bounds.kl_lr_factor
        self.state.kl_lr_scale = max(bounds.kl_lr_floor, lowered)
        text = (
            f"kl_pi_mu_k3 {kl:.3g} > guards.max_kl {bounds.max_kl:.3g}: learning rate at "
            f"{self.state.kl_lr_scale:.0%} of its schedule"
        )
        return [Alert("kl", text)]

    def _check_ratios(self, divergence: Divergence) -> list[Alert]:
        """Find ratios so far from 1 that few tokens carry the gradient, or wrong ones."""
        bounds, alerts = self._bounds, []
        share, mean = divergence.effective_sample_size, divergence.ratio_mean
        most, largest = bounds.max_ratio_mean, divergence.ratio_max
        if not share >= bounds.min_ess:  # in this form a NaN is out of bounds
            alerts.append(
                Alert(
                    "ess",
                    f"effective_sample_size {share:.3g} < guards.min_ess {bounds.min_ess:.3g}; "
                    "lower learner.lr or run.max_policy_lag",
                )
            )
        if most is not None and not 1 / most <= mean <= most:
            alerts.append(
                Alert(
                    "ratio_mean",
                    f"ratio_mean {mean:.3g} beyond guards.max_ratio_mean {most:g} or 1 / {most:g}; "
                    "if lag0_ratio_mean is too, engine and learner disagree, else lower learner.lr "
                    "or set actors.kv_on_swap: recompute",
                )
            )
        if bounds.max_ratio is not None and not largest <= bounds.max_ratio:
            alerts.append(
                Alert(
                    "ratio",
                    f"ratio_max {largest:.3g} > guards.max_ratio {bounds.max_ratio:g}; choose a "
                    "correction that truncates or masks",
                )
            )
        return alerts

    def _follow_targets(self, divergence: Divergence) -> None:
        state, algorithm, now = self.state, self._algorithm, self.algorithm
        if algorithm.kl_target is not None:
            state.kl_coefficient = adapt_kl_coefficient(
                now.kl_coefficient, divergence.kl_pi_ref_k3 or 0.0, target=algorithm.kl_target
            )
        if algorithm.entropy_target is not None:
            state.entropy_bonus = adapt_entropy_bonus(
                now.entropy_bonus,
                divergence.entropy,
                target=algorithm.entropy_target,
                step=algorithm.entropy_step,
            )


def adapt_kl_coefficient(coefficient: float, kl: float, *, target: float) -> float:
    """Raise the weight of the KL penalty where the KL is above its target, lower it below.

        e = clamp((kl - target) / target, -0.2, 0.2)
        coefficient <- coefficient (1 + 0.1 e)

    Args:
        coefficient: Weight in this batch.
        kl: KL(pi || ref) of this batch, nats per token.
        target: Target of the KL, nats per token.

    Returns:
        The weight in the next batch.

    Source:
        Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """
    error = min(MOST_KL_ERROR, max(-MOST_KL_ERROR, (kl - target) / target))
    return coefficient * (1 + KL_GAIN * error)


def adapt_entropy_bonus(bonus: float, entropy: float, *, target: float, step: float) -> float:
    """Raise the weight of the entropy by a fixed step below its target, lower it above, to 0.

    Args:
        bonus: Weight in this batch.
        entropy: Mean entropy of pi in this batch, nats per token.
        target: Least entropy, nats per token.
        step: Change of the weight with a batch.

    Returns:
        The weight in the next batch.

    Source:
        He et al. 2025 (Skywork-OR1), arXiv:2505.22312, section on adaptive entropy control.
    """
    return max(0.0, bonus + (step if entropy < target else -step))
