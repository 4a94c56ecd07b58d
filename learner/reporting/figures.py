"""Figures of `metrics.jsonl`: what each means, and where it is shown.

One line for each figure that a batch leaves. `nyala metrics`, docs/metrics.md, the learner's page
of `/metrics`, the names in trackers, the charts of reports and what the live view gets are made of
it. Loads without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.metrics import Metric

# --------------------------------------------------------------------------------------------------
# Charts of a report over the batches of a run.


@dataclass(frozen=True, slots=True)
class Plot:
    """How one chart shows its figures."""

    title: str
    note: str
    least: float | None = None
    """A value that the vertical axis includes."""
    most: float | None = None
    is_noisy: bool = False
    """Drawn faintly, with its running mean over it."""


@dataclass(frozen=True, slots=True)
class ChartLine:
    """The line of a figure in a chart."""

    plot: Plot
    label: str
    is_optional: bool = False
    """Left out where it is 0 or absent at all batches."""


SUPERVISED_FILE = "sft.jsonl"
"""Beside a model's weights: lines of the supervised training that made them."""

SUPERVISED = Plot(
    "Supervised loss",
    "Cross entropy of trained tokens, and of rows that are set aside, nats a token.",
    least=0.0,
)
LEARNING = (
    REWARD := Plot("Sampled reward",
        "Mean over the episodes of each batch; bold, its running mean.", is_noisy=True),
    LOSS := Plot("Loss",
        "Policy loss, as it was minimised; its level means little, jumps mean much.",
        is_noisy=True),
    ENTROPY := Plot("Entropy",
        "Entropy of the next token under the trained policy, nats. Near 0 nothing new is sampled.",
        least=0.0),
    GRAD_NORM := Plot("Gradient norm", "Before clipping.", least=0.0, is_noisy=True),
    LEARNING_RATE := Plot("Learning rate", "Learning rate of the optimizer.", least=0.0),
    TEACHER := Plot("Distance to the teacher",
        "KL(π‖teacher) of the sampled tokens, nats a token: what on-policy distillation lowers.",
        least=0.0),
    LENGTH := Plot("Completion length", "Tokens of an episode.", least=0.0),
    NO_SIGNAL := Plot("Episodes without a signal",
        "Share of completions that were cut off; groups whose rewards are all equal.", least=0.0),
    PROMPTS := Plot("Prompts by success",
        "Shares of the prompts that the sampler chooses among.", least=0.0, most=1.0),
)  # fmt: skip
OFF_POLICY = (
    KL := Plot("KL divergence",
        "Divergence of the trained policy from the one that sampled, nats a token.", least=0.0),
    SAMPLE_SIZE := Plot("Effective sample size",
        "Share of tokens, and of whole episodes, that carry information after reweighting.",
        most=1.0),
    CLIPPED := Plot("Clipped tokens",
        "Share of tokens on which a bound of the loss acted.", least=0.0),
    TRAINED_SHARE := Plot("Share of tokens trained",
        "Fresh tokens are within the bound of the policy lag at their claim.", least=0.0,
        most=1.0),
    LAG := Plot("Policy lag",
        "Batches between the policy that sampled a token and the one that trains it.", least=0.0),
)  # fmt: skip
SPEED = (
    TOKENS := Plot("Tokens per second",
        "Generated tokens that reached the learner, by wall time.", least=0.0, is_noisy=True),
    MEMORY := Plot("Memory",
        "GiB of the learner with all its processes, and of the largest actor with its own.",
        least=0.0),
    CORES := Plot("Processor cores", "In use by the learner, and by all actors together.",
        least=0.0),
)  # fmt: skip
TIME = Plot("The learner's time", "Shares in per cent; while it waits for episodes it is idle.")
"""Drawn as stacked areas; lines of one label are added up."""

# --------------------------------------------------------------------------------------------------
# The figures.


@dataclass(frozen=True, slots=True)
class Figure:
    """One key of a line of `metrics.jsonl`."""

    key: str
    unit: str
    meaning: str
    group: str = ""
    """First part of its name in trackers, which draw a section for each; the whole name where it
    has a slash or is the key. Empty = trackers do not get it."""
    prometheus: Metric | None = None
    """Metric on the learner's page; a counter adds batches up, of a list each name."""
    chart: ChartLine | None = None
    is_total: bool = False
    """Counted since the start of the learner, not in this batch alone."""
    live: Literal["", "recent", "newest"] = ""
    """Whether the live view gets it of recent batches, or of the newest alone."""


FIGURES = (
    # The batch.
    Figure("step", "batches", "Number of the batch, from 1.", "",
        Metric("nyala_learner_step", "gauge", "batches", "Batches trained in the run."),
        live="recent"),
    Figure("lineage", "1", "Life of the learner that trained it.", "progress",
        Metric("nyala_learner_lineage", "gauge", "1", "Life of the learner, from 1.")),
    Figure("time", "s", "Unix time of the line.", live="recent"),
    Figure("is_replay", "true or false", "Whether an earlier life of the learner sealed the "
        "batch.", "progress"),
    Figure("wall_s", "s", "Time of the run so far, over all lives of the learner.", "progress",
        live="recent"),
    # The optimizer.
    Figure("loss", "1", "Mean over the optimizer steps; includes the KL to the reference with "
        "`kl_in: loss`.", "train",
        Metric("nyala_learner_loss", "gauge", "1", "Loss of the last batch."),
        ChartLine(LOSS, "loss")),
    Figure("grad_norm", "1", "Largest gradient norm of the optimizer steps, before clipping; not "
        "finite where a step was skipped.", "train",
        Metric("nyala_learner_grad_norm", "gauge", "1",
            "Largest gradient norm before clipping."), ChartLine(GRAD_NORM, "norm")),
    Figure("learning_rate", "1", "Learning rate of all optimizer steps of the batch.", "train",
        Metric("nyala_learner_learning_rate", "gauge", "1", "Learning rate."),
        ChartLine(LEARNING_RATE, "lr")),
    Figure("sft_loss", "nats", "Supervised training: mean cross entropy of the trained tokens of "
        "the step.", "train",
        Metric("nyala_learner_sft_loss_nats", "gauge", "nats per token",
            "Cross entropy of the last supervised step."), ChartLine(SUPERVISED, "trained rows")),
    Figure("sft_held_out_loss", "nats", "Supervised training: mean cross entropy of the rows that "
        "are set aside, after the step; only where it is measured.", "train",
        chart=ChartLine(SUPERVISED, "rows set aside", is_optional=True)),
    Figure("sft_rows", "rows", "Supervised training: rows of the step.", "progress"),
    Figure("sft_tokens", "tokens", "Supervised training: tokens of the rows, trained or not.",
        "progress"),
    Figure("kl_coefficient", "1", "Weight of the KL to the reference in this batch.", "train"),
    Figure("entropy_bonus", "1", "Weight of the entropy in this batch.", "train"),
    Figure("value_loss", "1", "Loss of the critic: mean over the optimizer steps, without its "
        "coefficient.", "train"),
    Figure("value_mean", "reward", "Mean value over the trained tokens, at the beginning of the "
        "batch.",
        "train"),
    Figure("explained_variance", "1", "1 - Var(target - value) / Var(target) at the beginning of "
        "the batch: 1 = perfect, 0 = no better than a constant. 0 where all targets are equal.",
        "train"),
    Figure("critic_grad_norm", "1", "Largest gradient norm of the critic's optimizer steps, before "
        "clipping.", "train"),
    Figure("advantage_mean", "reward", "Mean advantage over trained tokens.", "train"),
    Figure("advantage_std", "reward", "Standard deviation of the advantage over trained tokens.",
        "train"),
    Figure("advantage_min", "reward", "Smallest advantage of a trained token.", "train"),
    Figure("advantage_max", "reward", "Largest advantage of a trained token.", "train"),
    # pi, the trained policy, against mu, which sampled, and ref, the reference; rho is pi/mu.
    Figure("kl_pi_mu_k1", "nats", "KL(pi || mu) per token, nats: mean of rho log(rho).",
        "off_policy"),
    Figure("kl_pi_mu_k2", "nats", "KL(pi || mu) to second order: mean of rho log(rho)^2 / 2.",
        "off_policy"),
    Figure("kl_pi_mu_k3", "nats", "KL(pi || mu): mean of rho log(rho) - rho + 1, unbiased, never "
        "negative.", "off_policy",
        Metric("nyala_learner_kl_nats", "gauge", "nats per token",
            "KL(pi || mu) of the last batch."), ChartLine(KL, "KL(π‖μ)")),
    Figure("kl_mu_pi_k1", "nats", "KL(mu || pi) per token, nats: mean of -log(rho).", "off_policy"),
    Figure("kl_mu_pi_k2", "nats", "KL(mu || pi) to second order: mean of log(rho)^2 / 2.",
        "off_policy"),
    Figure("kl_mu_pi_k3", "nats", "KL(mu || pi): mean of rho - 1 - log(rho), unbiased, never "
        "negative.", "off_policy"),
    Figure("kl_pi_ref_k1", "nats", "KL(pi || ref) per token, nats: mean of rho log(pi/ref); None "
        "without a reference.", "reference"),
    Figure("kl_pi_ref_k2", "nats", "KL(pi || ref) to second order: mean of rho log(pi/ref)^2 / 2.",
        "reference"),
    Figure("kl_pi_ref_k3", "nats", "KL(pi || ref): mean of rho (ref/pi - 1 - log(ref/pi)), "
        "unbiased, never negative.", "reference",
        Metric("nyala_learner_reference_kl_nats", "gauge", "nats per token",
            "KL(pi || reference)."), ChartLine(KL, "KL(π‖reference)", is_optional=True)),
    Figure("teacher_kl", "nats", "KL(pi || teacher) per token, nats: mean of rho log(pi/teacher) "
        "over the tokens that have a teacher; None without one.", "train",
        Metric("nyala_learner_teacher_kl_nats", "gauge", "nats per token",
            "KL(pi || teacher)."), ChartLine(TEACHER, "KL(π‖teacher)", is_optional=True)),
    Figure("entropy", "nats", "Mean entropy of pi at the sampling temperature, nats.", "train",
        Metric("nyala_learner_entropy_nats", "gauge", "nats", "Mean entropy of pi."),
        ChartLine(ENTROPY, "entropy")),
    Figure("ratio_mean", "1", "Mean of rho = pi/mu; 1 in expectation as long as mu covers pi.",
        "off_policy",
        Metric("nyala_learner_ratio_mean", "gauge", "1", "Mean of pi/mu over tokens.")),
    Figure("ratio_std", "1", "Standard deviation of rho.", "off_policy"),
    Figure("ratio_max", "1", "Largest rho.", "off_policy",
        Metric("nyala_learner_ratio_max", "gauge", "1", "Largest pi/mu of a token.")),
    Figure("ratio_percentiles", "1, by percent", "Percent -> rho, with log(rho) accurate to 5 %.",
        "off_policy"),
    Figure("log_ratio_histogram", "tokens by nats", "Bin of log(rho), nats -> trained tokens. A "
        "bin is named by its edge nearer to 0: `0.03` holds 0.03 to 0.1, `-0.03` holds -0.1 to "
        "-0.03, `3` all larger values, `0` all values within 0.001 of 0.", "off_policy"),
    Figure("chi_square", "1", "chi^2(pi || mu) per token: mean of rho^2 - 1, the variance that the "
        "ratios add.", "off_policy"),
    Figure("effective_sample_size", "0 to 1", "(sum rho)^2 / (N sum rho^2), in (0, 1]: the share "
        "of tokens that carry information.", "off_policy",
        Metric("nyala_learner_effective_sample_ratio", "gauge", "0 to 1",
            "Effective sample size."), ChartLine(SAMPLE_SIZE, "tokens")),
    Figure("sequence_effective_sample_size", "0 to 1", "Effective sample size of whole episodes, "
        "whose ratio is the product over their tokens.",
        "off_policy", chart=ChartLine(SAMPLE_SIZE, "episodes")),
    Figure("sequence_ratio_mean", "1", "Mean over episodes of the product of rho over their "
        "tokens.", "off_policy"),
    Figure("clip_fraction_low", "0 to 1",
        "Share of tokens that the surrogate's lower bound acted on.", "off_policy",
        Metric("nyala_learner_clipped_low_ratio", "gauge", "0 to 1",
            "Tokens at the lower clip bound."), ChartLine(CLIPPED, "below the lower bound")),
    Figure("clip_fraction_high", "0 to 1",
        "Share of tokens that the surrogate's upper bound acted on.", "off_policy",
        Metric("nyala_learner_clipped_high_ratio", "gauge", "0 to 1",
            "Tokens at the upper clip bound."), ChartLine(CLIPPED, "above the upper bound")),
    Figure("truncated_fraction", "0 to 1", "Share of tokens with rho > rho_bar.", "off_policy",
        chart=ChartLine(CLIPPED, "ratio truncated", is_optional=True)),
    Figure("mask_fraction_low", "0 to 1", "Share of tokens that the correction masked and whose "
        "rho is below 1.", "off_policy",
        chart=ChartLine(CLIPPED, "masked, ratio below 1", is_optional=True)),
    Figure("mask_fraction_high", "0 to 1", "Share of tokens that the correction masked and whose "
        "rho is at least 1.", "off_policy",
        chart=ChartLine(CLIPPED, "masked, ratio above 1", is_optional=True)),
    Figure("lag0_tokens", "tokens", "Tokens of episodes that were wholly sampled at lag 0, before "
        "the batch's first optimizer step. There pi = mu, so a difference is only numerical. An "
        "episode that saw a swap has keys and values of older weights (`actors.kv_on_swap`), and "
        "counts as lagged.", "off_policy"),
    Figure("lag0_ratio_mean", "1", "Mean rho of the `lag0_tokens`.", "off_policy"),
    Figure("lag0_ratio_max", "1", "Largest rho of the `lag0_tokens`.", "off_policy"),
    Figure("lag0_logprob_diff_mean", "nats", "Mean |log pi - log mu| of the `lag0_tokens`, nats: "
        "the engine's rounding against the learner's.", "off_policy"),
    Figure("lag0_logprob_diff_max", "nats", "Largest |log pi - log mu| of the `lag0_tokens`, "
        "nats.",
        "off_policy"),
    Figure("lag0_temperature_excess", "1", "Share by which the engine's temperature is above "
        "`run.temperature`, estimated from the `lag0_tokens`: regression of log pi - log mu on log "
        "pi + entropy, which is how log pi changes with the scale of the logits.", "off_policy"),
    Figure("lag0_temperature_weight", "nats^2", "Sum of (log pi + entropy)^2 over the "
        "`lag0_tokens`: the error of `lag0_temperature_excess` is a token's rounding over the root "
        "of this.",
        "off_policy"),
    Figure("lagged_ratio_mean", "1", "Mean rho of tokens that are not `lag0_tokens`: numerics, and "
        "the change of pi since they were sampled.", "off_policy"),
    Figure("lagged_logprob_diff_mean", "nats", "Mean |log pi - log mu| of tokens that are not "
        "`lag0_tokens`, nats.",
        "off_policy"),
    Figure("lagged_logprob_diff_max", "nats", "Largest |log pi - log mu| of tokens that are not "
        "`lag0_tokens`, nats.", "off_policy"),
    # Rewards, and what was sampled.
    Figure("reward_mean", "reward", "Mean shaped reward over episodes; all figures of rewards are "
        "of shaped rewards.",
        "reward", Metric("nyala_learner_reward", "gauge", "reward", "Mean reward of the batch."),
        ChartLine(REWARD, "reward"), live="recent"),
    Figure("reward_std", "reward", "Standard deviation of the reward over the episodes of the "
        "batch.", "reward",
        Metric("nyala_learner_reward_std", "gauge", "reward",
            "Standard deviation of the batch's rewards.")),
    Figure("reward_parts", "reward by part", "Mean of each named part of the reward.", "reward"),
    Figure("zero_variance_groups", "groups", "Groups whose rewards are all equal; under group "
        "baselines they have no gradient.", "reward"),
    Figure("filtered_groups", "groups", "Groups of equal rewards that were replaced by others.",
        "reward"),
    Figure("prompts_unseen", "0 to 1", "Share of the prompts that `run.sampler` chooses among that "
        "were never trained; there unless it is `uniform`.", "prompts",
        chart=ChartLine(PROMPTS, "unseen", is_optional=True)),
    Figure("prompts_hard", "0 to 1", "Share of the sampler's prompts with a success below 0.2.",
        "prompts", chart=ChartLine(PROMPTS, "success below 0.2", is_optional=True)),
    Figure("prompts_medium", "0 to 1", "Share of the sampler's prompts with a success from 0.2 to "
        "0.8.", "prompts", chart=ChartLine(PROMPTS, "success from 0.2 to 0.8", is_optional=True)),
    Figure("prompts_easy", "0 to 1", "Share of the sampler's prompts with a success above 0.8 that "
        "are not solved.", "prompts", chart=ChartLine(PROMPTS, "success above 0.8",
            is_optional=True)),
    Figure("prompts_solved", "0 to 1", "Share of the sampler's prompts with a success of at least "
        "0.95, which `difficulty` has retired.", "prompts",
        chart=ChartLine(PROMPTS, "solved", is_optional=True)),
    Figure("environments", "by name", "`episodes`, `groups`, `zero_variance_groups`, "
        "`reward_mean`, and `accuracy` where the reward has a part `exact`.", "environments"),
    Figure("policy_lag_mean", "batches", "Mean lag of trained tokens, batches.", "lag",
        Metric("nyala_learner_policy_lag_mean", "gauge", "batches",
            "Mean policy lag of trained tokens."), ChartLine(LAG, "mean"), live="recent"),
    Figure("policy_lag_max", "batches", "Lag of the oldest trained token.", "lag",
        Metric("nyala_learner_policy_lag_max", "gauge", "batches",
            "Largest policy lag of the batch."), ChartLine(LAG, "largest"), live="recent"),
    Figure("policy_lag_histogram", "tokens by lag", "Lag -> trained tokens.", "lag"),
    Figure("fresh_trained_fraction", "0 to 1", "Share of fresh tokens (within "
        "`run.max_policy_lag` at their claim) that were trained, over the new groups of the batch "
        "and the groups dropped as stale while it filled; 1 if there are none.", "lag",
        Metric("nyala_learner_fresh_trained_ratio", "gauge", "0 to 1",
            "Share of tokens within the lag bound that were trained."),
        ChartLine(TRAINED_SHARE, "fresh tokens", is_optional=True), live="newest"),
    Figure("sampled_trained_fraction", "0 to 1", "Share of all sampled tokens of the same groups "
        "that were trained.", "lag",
        chart=ChartLine(TRAINED_SHARE, "all sampled tokens", is_optional=True)),
    Figure("stale_masked_tokens", "tokens", "Sampled tokens of new groups that were context only "
        "because they were stale (`buffer.on_stale: mask`).", "lag",
        Metric("nyala_learner_stale_masked_tokens_total", "counter", "tokens",
            "Tokens that were context only because they were stale.")),
    Figure("mixed_version_episodes", "episodes",
        "Episodes sampled by more than one policy version.", "lag"),
    Figure("response_length_mean", "tokens", "Completion tokens per episode.", "response",
        Metric("nyala_learner_response_tokens", "gauge", "tokens",
            "Mean length of a completion."), ChartLine(LENGTH, "mean")),
    Figure("response_length_max", "tokens", "Completion tokens of the longest episode.", "response",
        chart=ChartLine(LENGTH, "longest")),
    Figure("response_truncated_fraction", "0 to 1", "Share of episodes cut off by the token limit.",
        "response",
        Metric("nyala_learner_truncated_ratio", "gauge", "0 to 1",
            "Episodes cut off by the token limit."),
            ChartLine(NO_SIGNAL, "cut off by the token limit")),
    Figure("masked_episodes", "episodes", "Episodes without a trained token, due to overlong "
        "filtering or because all of them are stale.", "response"),
    Figure("episodes_by_length", "episodes by name", "Bucket of completion tokens -> episodes; "
        "`dropped_by_length` counts dropped ones.", "response"),
    # Speed, and the phases of a batch.
    Figure("mfu", "0 to 1", "Share of the cards' peak that is used; None where the peak is not "
        "known.", "speed",
        Metric("nyala_learner_mfu_ratio", "gauge", "0 to 1",
            "Share of the cards' peak that is used, where known."), live="recent"),
    Figure("trained_tokens_per_s", "tokens/s", "Speed of training, without waits.", "speed",
        Metric("nyala_learner_step_tokens_per_second", "gauge", "tokens/s",
            "Speed of the last batch's training, without waits.")),
    Figure("peak_tflops", "10^12 operations/s", "Peak of one card, to which `mfu` refers.",
        "speed"),
    Figure("peak_gib", "GiB by phase", "Most GPU memory allocated; null on a CPU.", "speed"),
    Figure("learner_memory_gib", "GiB", "Resident memory of the learner and the processes that it "
        "started; memory that they share is counted in each.", "speed",
        Metric("nyala_learner_memory_gib", "gauge", "GiB",
            "Resident memory of the learner's processes."),
        ChartLine(MEMORY, "learner", is_optional=True), live="newest"),
    Figure("learner_cores", "cores", "Recent CPU seconds per second of the learner and the "
        "processes that it started.", "speed",
        Metric("nyala_learner_cores", "gauge", "cores",
            "CPU seconds per second of the learner's processes."),
        ChartLine(CORES, "learner", is_optional=True), live="newest"),
    Figure("actor_memory_gib", "GiB", "Resident memory of the largest actor with the processes "
        "that it started; `nyala status` shows each actor.", "actors",
        chart=ChartLine(MEMORY, "largest actor", is_optional=True), live="newest"),
    Figure("actor_cores", "cores", "Recent CPU seconds per second of all actors.",
        "actors", chart=ChartLine(CORES, "actors", is_optional=True), live="newest"),
    Figure("idle_fraction", "0 to 1", "Share of the run's time spent waiting for batches.",
        "speed"),
    Figure("wait_s", "s", "Waiting for the batch: the learner is idle.", "time",
        chart=ChartLine(TIME, "waiting for episodes"), live="recent"),
    Figure("fetch_s", "s", "Reading records, on all ranks but the first.", "time",
        chart=ChartLine(TIME, "fetching and packing"), live="recent"),
    Figure("pack_s", "s", "Packing episodes into microbatches.", "time",
        chart=ChartLine(TIME, "fetching and packing"), live="recent"),
    Figure("prepare_s", "s", "Passes without a gradient, before the first optimizer step.", "time",
        chart=ChartLine(TIME, "forward"), live="recent"),
    Figure("forward_s", "s", "Forward passes and losses.", "time", chart=ChartLine(TIME, "forward"),
        live="recent"),
    Figure("backward_s", "s", "Backward passes.", "time",
        chart=ChartLine(TIME, "backward and optimizer"), live="recent"),
    Figure("clip_s", "s", "Norm and clipping of the gradient.", "time",
        chart=ChartLine(TIME, "backward and optimizer"), live="recent"),
    Figure("optimizer_s", "s", "Optimizer steps.", "time",
        chart=ChartLine(TIME, "backward and optimizer"), live="recent"),
    Figure("gather_s", "s", "Waiting for the weights of the previous version to be gathered.",
        "time",
        chart=ChartLine(TIME, "weights to actors"), live="recent"),
    Figure("checkpoint_s", "s", "Time for which a checkpoint stops training.", "time",
        chart=ChartLine(TIME, "checkpoints, other"), live="recent"),
    Figure("other_s", "s", "All other time between two batches.", "time",
        chart=ChartLine(TIME, "checkpoints, other"), live="recent"),
    # How much was trained.
    Figure("episodes", "episodes", "Episodes of the batch.", "progress",
        Metric("nyala_learner_episodes_total", "counter", "episodes", "Trained episodes.")),
    Figure("groups", "groups", "Groups of the batch.", "progress"),
    Figure("prompt_tokens", "tokens", "Prompt tokens of all episodes.", "progress"),
    Figure("trained_tokens", "tokens", "Tokens with loss mask 1.", "progress",
        Metric("nyala_learner_trained_tokens_total", "counter", "tokens",
            "Tokens with loss mask 1."), live="recent"),
    Figure("completion_tokens", "tokens", "Completion tokens, those of the environment included.",
        "progress",
        Metric("nyala_learner_completion_tokens_total", "counter", "tokens",
            "Completion tokens of trained episodes, those of the environment included."),
        live="recent"),
    Figure("optimizer_steps", "optimizer steps", "Steps of the batch, skipped ones included.",
        "progress"),
    Figure("skipped_steps", "optimizer steps",
        "Steps left out because loss or gradient were not finite.", "train",
        Metric("nyala_learner_skipped_steps_total", "counter", "optimizer steps",
            "Steps left out because loss or gradient were not finite.")),
    Figure("skipped_for_loss", "optimizer steps",
        "Skipped steps whose loss was not finite.", "train"),
    Figure("reused_groups", "groups", "Groups that an earlier batch trained too; the other figures "
        "include them.", "reuse"),
    Figure("reused_episodes", "episodes", "Episodes of the reused groups.", "reuse"),
    Figure("reused_tokens", "tokens", "Completion tokens of the reused groups, which were "
        "generated for an earlier batch.",
        "reuse"),
    Figure("reused_policy_lag_mean", "batches", "Mean policy lag of the trained tokens of reused "
        "groups.", "reuse"),
    Figure("reuse_count_max", "times", "Largest number of times that a reused group has been "
        "trained again, this batch included.", "reuse"),
    # What was not trained, what needs attention, and the actors.
    Figure("dropped_groups", "groups by reason", "Groups dropped in this life of the learner.",
        "dropped",
        Metric("nyala_learner_dropped_groups_total", "counter", "groups",
            "Groups dropped when they were claimed.", label="reason"), is_total=True,
        live="recent"),
    Figure("dropped_by_length", "episodes by length", "Episodes dropped in this life of the "
        "learner, by tokens of the completion.",
        "dropped", is_total=True),
    Figure("dropped_samples", "episodes", "Sampled texts that were not kept for lack of room.",
        "dropped", is_total=True),
    Figure("alerts", "names", "Conditions that need attention; the learner's log has their text.",
        "health",
        Metric("nyala_learner_alerts_total", "counter", "batches",
            "Batches with this alert (`alerts` in metrics.jsonl).", label="alert"), live="recent"),
    Figure("advice", "list", "`rule` and `text` of the current advice.", "health",
        live="newest"),
    Figure("sampling_alarms", "alarms", "Times since the learner's start that no actor sampled.",
        "actors",
        Metric("nyala_learner_sampling_alarms_total", "counter", "alarms",
            "Times that no actor sampled."), is_total=True),
    Figure("episodes_by_actor", "episodes by name",
        "Incarnation that finished the episode -> episodes.", "actors/sampling"),
    Figure("resumed_episodes", "episodes", "Episodes begun by one actor and continued by another.",
        "actors"),
    Figure("actors", "actors", "Actors with a recent heartbeat, with or without weights.",
        "actors/present"),
    Figure("actors_wanted", "actors", "Actors that the run wants: `nyala_actors_wanted`.",
        "actors/wanted", live="newest"),
    Figure("actors_wanted_why", "text", "Reason for `actors_wanted`.", live="newest"),
    Figure("actor_hours", "h", "Total time of all actors of the run.", "actors/hours"),
    Figure("cost", "money", "Cost of `actor_hours` by `fleet.price_per_actor_hour`; null without a "
        "price.",
        "actors", live="newest"),
)  # fmt: skip
"""Gauges before counters: the page of `/metrics` has this order."""
