"""The summary of a finished run as a table, as `nyala up`, `top` and `status` print it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from console.run.run_folder import RunFolder

from .display import print_line
from .progress import advice_in

ROWS = {
    "held_out_sampled": ("  of sampled answers", "{:.3f}"),
    "sft_loss_first": ("supervised loss, first step", "{:.4f}"),
    "sft_loss_last": ("supervised loss, last step", "{:.4f}"),
    "steps": ("batches", "{:,.0f}"),
    "sft_rows": ("rows trained, again ones included", "{:,.0f}"),
    "episodes": ("episodes trained", "{:,.0f}"),
    "reused_episodes": ("  for another time", "{:,.0f}"),
    "resumed_episodes": ("  that another actor had begun", "{:,.0f}"),
    "generated_tokens": ("tokens generated", "{:,.0f}"),
    "trained_tokens": ("tokens trained", "{:,.0f}"),
    "wall_s": ("time, s", "{:,.1f}"),
    "learner_idle_fraction": ("learner idle", "{:.1%}"),
    "learner_idle_for_weights_fraction": ("learner idle for weights", "{:.1%}"),
    "generation_paused_fraction": ("generation paused for weights", "{:.1%}"),
    "policy_lag_mean": ("policy lag, mean", "{:.2f}"),
    "policy_lag_max": ("policy lag, max", "{:.0f}"),
    "fresh_trained_fraction": ("fresh tokens trained", "{:.1%}"),
    "sampled_trained_fraction": ("sampled tokens trained", "{:.1%}"),
    "stale_masked_tokens": ("stale tokens masked", "{:,.0f}"),
    "skipped_steps": ("optimizer steps skipped", "{:,.0f}"),
    "skipped_for_loss": ("  because of the loss", "{:,.0f}"),
    "rollbacks": ("rollbacks", "{:,.0f}"),
    "learner_lives": ("lives of the learner", "{:,.0f}"),
    "tasks_created": ("tasks created", "{:,.0f}"),
    "tasks_committed": ("  committed", "{:,.0f}"),
    "tasks_dropped": ("  dropped", "{:,.0f}"),
    "tasks_dropped_by_reason": ("    by reason", "{:,}"),
    "tasks_dead": ("  dead", "{:,.0f}"),
    "tasks_cancelled": ("  cancelled at the end", "{:,.0f}"),
}
"""Key of `summary.json` -> label and format."""

HELD_OUT = re.compile(r"held_out_(.+)_(before|after|by_environment)")
"""Keys of `summary.json` that name what held-out answers are judged by; they come first."""

QUIET = {"reused_episodes", "resumed_episodes", "skipped_steps", "skipped_for_loss", "rollbacks"}
"""Keys that are left out where they are 0."""


def print_result(console: Console, folder: RunFolder) -> None:
    """Show the summary of a finished run, the advice that held at its end, and its files."""
    summary = folder.read_summary()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for label, value in rows_of(summary).items():
        table.add_row(label, value)
    console.print(table)
    for text in advice_in(summary).values():
        print_line(console, f"ADVICE {text}")
    others = f"nyala checkpoint export {folder.path} --adapter --to FOLDER"
    for path, what in (
        (folder.report, "curves, settings and answers, for a browser"),
        (folder.path / "model", "trained model (Hugging Face directory)"),
        (
            folder.path / "adapter",
            f"adapter in PEFT's form, --lora-modules of vLLM; others: {others}",
        ),
        (folder.path, "metrics, checkpoints, logs"),
    ):
        if path.exists():
            console.print(f"{path}  {what}", highlight=False, soft_wrap=True)


def rows_of(summary: Mapping[str, object]) -> dict[str, str]:
    """Return label -> number as text; keys without a label of ours come last.

    Numbers of rare events are left out where they are 0.
    """
    rows: dict[str, str] = {}
    matches = [match for key in summary if (match := HELD_OUT.fullmatch(key))]
    judged = {match[0]: _held_out_label(match[1], match[2]) for match in matches}
    for key, (label, form) in (judged | ROWS).items():
        value = summary.get(key)
        if isinstance(value, Mapping):
            if value:
                figures = [(name, figure) for name, figure in value.items() if figure is not None]
                rows[label] = ", ".join(f"{name} {form.format(figure)}" for name, figure in figures)
        elif value is not None and not (value == 0 and key in QUIET):
            rows[label] = form.format(value)
        elif key in summary and key not in QUIET:
            rows[label] = "-"
    rest = summary.keys() - judged.keys() - ROWS.keys() - {"advice"}
    return rows | {key: str(summary[key]) for key in sorted(rest)}


def _held_out_label(judge: str, what: str) -> tuple[str, str]:
    title = judge.replace("accuracy_of_the_environment", "accuracy of the environment")
    label = "  by environment" if what == "by_environment" else f"held-out {title} {what}"
    return label, "{:.3f}"
