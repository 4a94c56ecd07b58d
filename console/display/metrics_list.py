"""All figures of a run, as lines and as the tables of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actors.metrics_page import METRICS as OF_ACTOR
from broker.metrics_page import METRICS as OF_BROKER
from configs.metrics import cards
from configs.metrics.figures import Metric
from configs.metrics.server import READY
from learner.reporting.keys import keys
from learner.reporting.metrics_page import METRICS as OF_LEARNER

PAGES = {
    "Every role": (READY,),
    "Learner and actor": cards.METRICS,
    "Broker": OF_BROKER,
    "Learner": tuple(each for each in OF_LEARNER if each not in cards.METRICS),
    "Actor": tuple(each for each in OF_ACTOR if each not in cards.METRICS),
}
"""Metrics by whose page has them."""


def as_lines() -> str:
    """Write one line for each figure."""
    rows = [("metrics.jsonl", key.name, key.unit, key.meaning) for key in keys()]
    for page, metrics in PAGES.items():
        rows += [(page.lower(), _shown(each), each.unit, each.meaning) for each in metrics]
    return "".join(f"{where}  {name}  [{unit}]  {meaning}\n" for where, name, unit, meaning in rows)


def as_markdown() -> str:
    """Write the tables of docs/metrics.md."""
    head = ("key", "unit", "meaning")
    parts = ["## Keys of metrics.jsonl", _table(head, [(f"`{k[0]}`", *k[1:]) for k in keys()])]
    for page, metrics in PAGES.items():
        rows = [(f"`{_shown(each)}`", each.kind, each.unit, each.meaning) for each in metrics]
        parts += [f"### {page}", _table(("metric", "kind", "unit", "meaning"), rows)]
        if page == "Every role":
            parts.insert(2, "## Metrics for Prometheus")
    return "\n\n".join(parts) + "\n"


def _shown(metric: Metric) -> str:
    return f"{metric.name}{{{metric.label}}}" if metric.label else metric.name


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(_lines([head, ["---"] * len(head), *rows]))


def _lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
