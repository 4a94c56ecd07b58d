"""Rules about optimization: learning rate, lag, engine against learner, entropy, clip bounds.

Their arguments and results are those of a `Conclusion` (`evidence.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.settings import Settings
from configs.tables.algorithm import CLIP_BOUNDS

from .evidence import Evidence, Window, middle, total

FAR, FAR_NO_MORE = 0.3, 0.15  # nats per token in a batch; the demo's most: 0.03
USUAL = 0.05
COLLAPSED_AFTER = 0.5  # nats: a jump such as no good run makes
GONE, GONE_NO_MORE = 0.1, 0.15  # of the first entropy
SURE = 0.05  # nats: below it hardly any answer differs from another
SOLVED = 0.9
DISAGREE, DISAGREE_NO_MORE = 0.1, 0.05  # nats; bfloat16 against bfloat16 is at 0.01 to 0.03
ENOUGH_TOKENS = 100
HOTTER, HOTTER_NO_MORE = 0.04, 0.02  # shares of a temperature
ENOUGH_WEIGHT = 100.0  # nats^2: five times as certain as that, with a rounding of 0.08 nats
BOUND_FACTOR = 5.0


def engine_disagrees(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find an engine that computes other log-probs than the learner for the same weights."""
    compared = [batch for batch in window.last(20) if batch.lag0_tokens]
    tokens = total(compared, lambda batch: batch.lag0_tokens)
    if tokens < ENOUGH_TOKENS:
        return None
    if excess := temperature_excess(compared, holds_already):
        return (
            f"the engine samples at {1 + excess:.3g} times run.temperature (now "
            f"{settings.run.temperature:g}), as {tokens:.0f} tokens of episodes by the very same "
            f"weights show; leave out what changes logits in actors.engine_args (now "
            f"{settings.actors.engine_args or '{}'}) and in the model's generation_config.json"
        )
    difference = (
        total(compared, lambda batch: batch.lag0_logprob_diff_mean * batch.lag0_tokens) / tokens
    )
    if difference <= (DISAGREE_NO_MORE if holds_already else DISAGREE):
        return None
    run = settings.run
    return (
        f"engine and learner disagree by {difference:.2g} nats per token on {tokens:.0f} tokens of "
        f"episodes by the very same weights; set run.head_dtype (now {run.head_dtype or 'null'}) "
        f"or run.dtype (now {run.dtype}) to float32, and leave out actors.engine_args (now "
        f"{settings.actors.engine_args or '{}'})"
    )


def temperature_excess(compared: Sequence[Evidence], holds_already: bool = False) -> float:
    """Return by what share the engine samples hotter than the learner assumes; 0 = not certain."""
    weight = total(compared, lambda batch: batch.lag0_temperature_weight)
    if weight < ENOUGH_WEIGHT:
        return 0.0
    leans = total(
        compared, lambda batch: batch.lag0_temperature_excess * batch.lag0_temperature_weight
    )
    excess = leans / weight
    return excess if abs(excess) > (HOTTER_NO_MORE if holds_already else HOTTER) else 0.0


def learning_rate_high(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find a policy that jumps from batch to batch, or has moved far from where it began."""
    recent = window.last(5)
    # A KL grows with the square of the distance, the distance with the batches in between.
    steps = [batch.kl / max(1.0, batch.policy_lag_mean) ** 2 for batch in recent]
    moved = sorted(steps)[len(steps) // 2]
    peak, step = window.peak
    rate = settings.learner.lr
    if moved > (FAR_NO_MORE if holds_already else FAR):
        return (
            f"the policy moves {moved:.2g} nats per token in a batch, where good runs move less "
            f"than {USUAL:g}: learner.lr (now {rate:g}) is too high; take a tenth of it, and "
            f"begin anew from the last good checkpoint"
        )
    entropy, first = middle(recent, lambda batch: batch.entropy), window.first_entropy
    is_other = entropy < GONE * first or entropy > max(2 * first, first + 0.5)
    if peak < COLLAPSED_AFTER or not is_other or _is_solved(window):
        return None
    return (
        f"the policy jumped by {peak:.2g} nats per token at batch {step}, and its entropy went "
        f"from {first:.2g} to {entropy:.2g}: it has collapsed, as learner.lr (now {rate:g}) is too "
        f"high; begin anew with a tenth of it"
    )


def lag_high(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find episodes so old that few of their tokens still count."""
    recent, bound = window.last(10), settings.guards.min_ess
    share = middle(recent, lambda batch: batch.effective_sample_size)
    lag = middle(recent, lambda batch: batch.policy_lag_mean)
    kl = middle(recent, lambda batch: batch.kl)
    is_far = share < bound * (1.2 if holds_already else 1.0) or kl > (0.3 if holds_already else 0.5)
    if lag < 1.0 or not is_far:
        return None
    run, algorithm = settings.run, settings.algorithm
    return (
        f"tokens are {lag:.1f} batches old on average, {share:.0%} of them carry the gradient "
        f"(guards.min_ess {bound:g}) and the policy has moved {kl:.2g} nats since: lower "
        f"run.max_policy_lag (now {run.max_policy_lag}) or learner.lr (now "
        f"{settings.learner.lr:g}); algorithm.surrogate (now {algorithm.surrogate}) clip and m2po "
        f"bear old data best"
    )


def clip_bounds_odd(window: Window, settings: Settings, holds_already: bool) -> str | None:  # noqa: ARG001 - settings do not change
    """Find clip bounds that are far from those of the surrogate's paper."""
    algorithm = settings.algorithm
    if algorithm.surrogate not in CLIP_BOUNDS:
        return None
    clipped = middle(window.last(10), lambda batch: batch.clipped)
    for name, usual in zip(
        ("clip_low", "clip_high"), CLIP_BOUNDS[algorithm.surrogate], strict=True
    ):
        bound = getattr(algorithm, name)
        factor = max(bound / usual, usual / bound)
        if factor >= BOUND_FACTOR:
            side = "wider" if bound > usual else "narrower"
            return (
                f"algorithm.{name} (now {bound:g}) is {factor:,.0f} times {side} than the "
                f"{usual:g} that users of {algorithm.surrogate} take, and {clipped:.0%} of tokens "
                f"are clipped; leave it out to get {usual:g}"
            )
    return None


def entropy_gone(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find a policy that has stopped trying anything else, far from the best reward."""
    recent = window.last(5)
    entropy, first = middle(recent, lambda batch: batch.entropy), window.first_entropy
    bound = min(SURE, (GONE_NO_MORE if holds_already else GONE) * first)
    if entropy >= bound or _is_solved(window):
        return None
    algorithm = settings.algorithm
    return (
        f"the entropy fell from {first:.2g} to {entropy:.2g} nats per token, so the policy tries "
        f"nothing else any more at a mean reward of {recent[-1].reward_mean:.3g}: lower learner.lr "
        f"(now {settings.learner.lr:g}), set algorithm.entropy_bonus (now "
        f"{algorithm.entropy_bonus:g}) or widen algorithm.clip_high (now {algorithm.clip_high:g}), "
        f"and begin from an earlier checkpoint"
    )


def _is_solved(window: Window) -> bool:
    mean = middle(window.last(5), lambda batch: batch.reward_mean)
    return mean >= SOLVED * window.best_reward > 0
