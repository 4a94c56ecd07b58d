"""`reward.png`: sampled reward of every step, and held-out accuracy, over the steps of a run."""

from __future__ import annotations

from pathlib import Path

from console.run.run_folder import RunFolder

from .json_lines import number, read_rows
from .progress import accuracies as accuracies_of

SMOOTHING = 0.9  # share of the past in the running mean: half of it is younger than seven steps


def draw_reward(folder: RunFolder, *, title: str) -> Path | None:
    """Draw the curve of a run; None while there is no step to draw."""
    rewards = {int(number(row, "step")): row for row in read_rows(folder.metrics)}
    if not rewards:
        return None
    accuracies = {int(number(row, "step")): row for row in read_rows(folder.evaluations)}
    steps = sorted(rewards)
    sampled = [number(rewards[step], "reward_mean") for step in steps]

    from matplotlib.figure import Figure  # noqa: PLC0415 - matplotlib

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, sampled, color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(steps, smooth(sampled), color="tab:blue", linewidth=2, label="sampled reward")
    if accuracies:
        points = sorted(accuracies)
        axes.plot(
            points,
            [number(accuracies[step], "accuracy") for step in points],
            color="tab:orange",
            marker="o",
            linewidth=1.5,
            label="held-out accuracy (greedy)",
        )
        for name in accuracies_of(accuracies[points[-1]]):
            known = [step for step in points if name in accuracies_of(accuracies[step])]
            values = [accuracies_of(accuracies[step])[name] for step in known]
            axes.plot(known, values, linestyle=":", marker=".", linewidth=1, label=f"of {name}")
    axes.set(title=title, xlabel="batches trained", ylabel="reward, accuracy")
    axes.set_ylim(min(0.0, *sampled) - 0.02, max(1.0, *sampled) + 0.02)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(folder.plot, dpi=120)
    return folder.plot


def smooth(values: list[float]) -> list[float]:
    """Return the running mean with forgetting, unbiased at its start."""
    smoothed: list[float] = []
    total = weight = 0.0
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        smoothed.append(total / weight)
    return smoothed
