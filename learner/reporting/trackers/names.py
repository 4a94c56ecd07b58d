"""Names of figures in trackers: keys of `metrics.jsonl` and `eval.jsonl` in groups, with slashes.

Trackers draw one section for each first part of a name. Loads without torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping

from configs.settings import Settings

from .tracker import Parameters

Line = Mapping[str, object]

GROUPS = {
    "progress": ("lineage", "is_replay", "wall_s", "episodes", "groups", "optimizer_steps",
        "prompt_tokens", "completion_tokens", "trained_tokens"),
    "train": ("loss", "grad_norm", "critic_grad_norm", "learning_rate", "entropy", "entropy_bonus",
        "kl_coefficient", "skipped_steps", "skipped_for_loss", "value_loss", "value_mean",
        "explained_variance", "advantage_mean", "advantage_std", "advantage_min", "advantage_max"),
    "reward": ("reward_mean", "reward_std", "reward_parts", "zero_variance_groups",
        "filtered_groups"),
    "response": ("response_length_mean", "response_length_max", "response_truncated_fraction",
        "masked_episodes", "episodes_by_length"),
    "environments": ("environments",),
    "off_policy": ("kl_pi_mu_k1", "kl_pi_mu_k2", "kl_pi_mu_k3", "kl_mu_pi_k1", "kl_mu_pi_k2",
        "kl_mu_pi_k3", "ratio_mean", "ratio_std", "ratio_max", "ratio_percentiles",
        "log_ratio_histogram", "chi_square",
        "effective_sample_size", "sequence_effective_sample_size", "sequence_ratio_mean",
        "clip_fraction_low", "clip_fraction_high", "truncated_fraction", "mask_fraction_low",
        "mask_fraction_high", "lag0_tokens", "lag0_ratio_mean", "lag0_ratio_max",
        "lag0_logprob_diff_mean", "lag0_logprob_diff_max", "lagged_ratio_mean",
        "lagged_logprob_diff_mean", "lagged_logprob_diff_max"),
    "reference": ("kl_pi_ref_k1", "kl_pi_ref_k2", "kl_pi_ref_k3"),
    "lag": ("policy_lag_mean", "policy_lag_max", "policy_lag_histogram", "mixed_version_episodes"),
    "reuse": ("reused_groups", "reused_episodes", "reused_tokens", "reused_policy_lag_mean",
        "reuse_count_max"),
    "actors": ("episodes_by_actor", "resumed_episodes", "sampling_alarms", "actors",
        "actors_wanted", "actor_hours", "cost"),
    "dropped": ("dropped_groups", "dropped_by_length", "dropped_samples"),
    "time": ("wait_s", "fetch_s", "pack_s", "gather_s", "prepare_s", "forward_s", "backward_s",
        "clip_s", "optimizer_s", "checkpoint_s", "other_s"),
    "speed": ("trained_tokens_per_s", "mfu", "peak_tflops", "peak_gib", "idle_fraction"),
    "health": ("alerts", "advice"),
}  # fmt: skip
"""First part of the name -> keys of `metrics.jsonl`."""
RENAMED = {
    "environments": "environments",  # figures by name, each of which has parts of its own
    "episodes_by_actor": "actors/sampling",
    "actors": "actors/present",
    "actors_wanted": "actors/wanted",
    "actor_hours": "actors/hours",
}
"""Keys whose names are not their group's and their own."""
COUNTED = ("episodes_by_actor", "alerts", "advice")
"""Keys of which only the number of entries is a figure: names of actors have no end."""
STUTTER = re.compile(r"^(reward|response|policy_lag|reused?|dropped)_")
"""What the name of a group repeats of a key."""
OF_EVALUATION = ("accuracy", "reward", "sampled", "environments", "episodes", "expected",
    "off_version", "wall_s")  # fmt: skip
"""Keys of `eval.jsonl` that are figures; all are in the group `eval`."""
OTHER = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that a part of MLflow's names may not have."""
MAX_PART = 100  # characters: MLflow's names have at most 250, and ours three parts


def _names() -> Iterator[tuple[str, str]]:
    for group, keys in GROUPS.items():
        for key in keys:
            yield key, RENAMED.get(key) or f"{group}/{STUTTER.sub('', key)}"


NAMES = dict(_names())
"""Key of `metrics.jsonl` -> its name; figures by name have one part more."""


def batch_figures(line: Line) -> dict[str, float]:
    """Name the figures of a line of `metrics.jsonl`."""
    figures: dict[str, float] = {}
    for key, name in NAMES.items():
        value = line.get(key)
        if key in COUNTED:
            value = len(value) if isinstance(value, list | dict) else None
        figures.update(_flat(name, value))
    return figures


def evaluation_figures(line: Line) -> dict[str, float]:
    """Name the figures of a line of `eval.jsonl`."""
    figures: dict[str, float] = {}
    for key in OF_EVALUATION:
        figures.update(_flat(f"eval/{key}", line.get(key)))
    return figures


def _flat(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            part = OTHER.sub("_", str(key))[:MAX_PART]
            yield from _flat(f"{name}/{part.strip('.') or '_'}", inner)
    elif isinstance(value, int | float) and math.isfinite(value):
        yield name, float(value)


# --------------------------------------------------------------------------------------------------
# Settings of a run as trackers keep them: one value for each name, and no secret.

CREDENTIALS = re.compile(r"(?<=://)[^@/\s]*@")
"""Name and password in an address."""
SECRET = re.compile(r"password|secret|token$|api_?key", re.IGNORECASE)
"""Names of settings of one's own, such as those of an environment, that are kept out."""
MAX_TEXT = 500  # characters of a value: what MLflow's databases have held from the beginning


def parameters_of(settings: Settings) -> Parameters:
    """List all settings as `table.key`; of a list or a table the JSON."""
    tree = settings.model_dump(mode="json", exclude={"trackers"})
    return {
        f"{table}.{key}": _plain(value)
        for table, keys in tree.items()
        for key, value in keys.items()
    }


def _plain(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(_without_secrets(value))
    return CREDENTIALS.sub("***@", text)[:MAX_TEXT]


def _without_secrets(value: object) -> object:
    if isinstance(value, dict):
        return {
            key: "***" if SECRET.search(key) else _without_secrets(each)
            for key, each in value.items()
        }
    return [_without_secrets(each) for each in value] if isinstance(value, list) else value
