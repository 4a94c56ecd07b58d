"""Lists of `nyala losses` and `nyala metrics`, for people, for programs and for the docs."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from difflib import get_close_matches

from actors.metrics_page import METRICS as OF_ACTOR
from broker.metrics_page import METRICS as OF_BROKER
from configs import markdown
from configs.errors import SettingsError
from configs.loader import check_tree
from configs.metrics import CARD_METRICS, Metric
from configs.metrics_server import READY
from configs.tables.algorithm import OF_FUNCTIONS, is_user_function
from learner.algorithm.catalogue import CHOICES, Entry, describe, entries, packaged_entries
from learner.algorithm.methods import METHODS, Method
from learner.algorithm.user_losses import load_user_losses
from learner.reporting.figures import FIGURES, Figure
from learner.reporting.metrics_page import METRICS as OF_LEARNER

# --------------------------------------------------------------------------------------------------
# The names that `algorithm` takes, rendered for people, for programs and for the docs.

WIDTH = 100
DOCS_WIDTH = 120
INDENT = "    "


def show_losses(name: str | None, *, as_json: bool, as_markdown: bool) -> None:
    """Print all names, or what one name stands for; as markdown always all.

    Raises:
        SettingsError: Nothing has this name.
    """
    chosen = losses_named(name) if name else (entries(), list(METHODS))
    if name is None:
        chosen = [*chosen[0], *packaged_entries()], chosen[1]
    if as_json:
        shown = {
            "choices": [asdict(e) for e in chosen[0]],
            "methods": [asdict(m) for m in chosen[1]],
        }
        text = json.dumps(shown, indent=2)
    else:
        text = losses_as_markdown() if as_markdown else "\n".join(_lines(*chosen))
    sys.stdout.write(text.rstrip("\n") + "\n")


def check_function(name: str | None, kind: str | None, overrides: Sequence[str]) -> None:
    """Check a function of the user, and print its sections and what holds.

    Args:
        name: Its name, as in the settings.
        kind: Key of `algorithm`, such as `surrogate`.
        overrides: Other settings that it reads.

    Raises:
        SettingsError: The function is wrong, or cannot be loaded.
    """
    if name is None or not is_user_function(name) or kind not in OF_FUNCTIONS:
        raise SettingsError(
            f"NAME and --check must name a function of yours and what it is, got {name} and "
            f"{kind}; write `nyala losses path/to/file.py:function --check KIND`, KIND being one "
            f"of {', '.join(OF_FUNCTIONS)}"
        )
    tree: dict[str, dict[str, str]] = {"run": {"model": "init"}, "algorithm": {kind: name}}
    settings = check_tree(tree, overrides, source="the command")
    functions = load_user_losses(settings.algorithm, max_policy_lag=settings.run.max_policy_lag)
    entry = describe(f"algorithm.{kind}", name, functions[kind])
    sys.stdout.write(
        "\n".join(_lines([entry], [])).rstrip("\n") + "\n\nchecked: nothing is wrong\n"
    )


def losses_named(name: str) -> tuple[list[Entry], list[Method]]:
    """Find what a name stands for; two choices may share a name.

    Raises:
        SettingsError: Nothing has this name.
    """
    wanted = name.casefold()
    chosen = [entry for entry in entries() if entry.name == wanted]
    methods = [method for method in METHODS if method.name.casefold() == wanted]
    if chosen or methods:
        return chosen, methods
    names = [entry.name for entry in entries()] + [method.name for method in METHODS]
    close = get_close_matches(name, names, n=3, cutoff=0.4)
    advice = f"did you mean {' or '.join(close)}?" if close else "`nyala losses` lists them"
    raise SettingsError(f"NAME must be one that `nyala losses` lists, got {name!r}; {advice}")


def losses_as_markdown() -> str:
    """Write the tables of docs/algorithms.md."""
    parts = []
    for choice in CHOICES:
        rows = [
            (f"`{e.name}`", f"`{e.formula}`", e.kind, _defaults(e), e.use, e.source)
            for e in entries()
            if e.setting == choice.setting
        ]
        meaning = textwrap.fill(choice.meaning, DOCS_WIDTH)
        head = ("name", "formula", "works on", "reads (default)", "use", "source")
        parts.append(f"### `{choice.setting}`\n\n{meaning}\n\n{markdown.table(head, rows)}")
    methods = [(m.name, f"`{_yaml(m)}`", m.note, m.source) for m in METHODS]
    table = markdown.table(("method", "settings", "what it is", "source"), methods)
    return "\n\n".join((*parts, f"### Published methods\n\n{table}")) + "\n"


def _lines(chosen: Sequence[Entry], methods: Sequence[Method]) -> Iterator[str]:
    for choice in CHOICES:
        members = [entry for entry in chosen if entry.setting == choice.setting]
        if members:
            yield f"{choice.setting}: {choice.meaning[:1].lower()}{choice.meaning[1:]}"
        for entry in members:
            yield ""
            yield f"  {entry.name:<22}{entry.formula}"
            yield from _paragraphs(
                ("", entry.summary),
                ("works on: ", entry.kind),
                ("use: ", entry.use),
                ("reads: ", _defaults(entry)),
                ("", entry.source),
            )
        if members:
            yield ""
    if methods:
        yield "published methods, as settings of `algorithm` unless they name their table:"
    for method in methods:
        yield f"\n  {method.name:<22}{_yaml(method)}"
        yield from _paragraphs(("", method.note), ("", method.source))


def _paragraphs(*labelled: tuple[str, str]) -> Iterator[str]:
    for label, text in labelled:
        if text:
            yield textwrap.fill(
                label + text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT
            )


def _defaults(entry: Entry) -> str:
    return ", ".join(f"{key} = {_value(value)}" for key, value in entry.defaults.items())


def _yaml(method: Method) -> str:
    return ", ".join(
        f"{key.removeprefix('algorithm.')}: {_value(value)}"
        for key, value in method.settings.items()
    )


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# --------------------------------------------------------------------------------------------------
# All figures of a run, as lines and as the tables of docs/metrics.md.

PAGES = {
    "Every role": (READY,),
    "Learner and actor": CARD_METRICS,
    "Broker": OF_BROKER,
    "Learner": tuple(metric for metric in OF_LEARNER if metric not in CARD_METRICS),
    "Actor": tuple(metric for metric in OF_ACTOR if metric not in CARD_METRICS),
}
"""Page -> the metrics that it shows."""


def metrics_as_lines(text: str | None = None) -> str:
    """Write one line for each figure, or for each whose name or meaning has a text in it.

    Raises:
        SettingsError: No figure has the text.
    """
    rows = [("metrics.jsonl", figure.key, figure.unit, figure.meaning) for figure in _sorted()]
    for page, metrics in PAGES.items():
        rows += [(page.lower(), _shown(metric), metric.unit, metric.meaning) for metric in metrics]
    lines = [f"{where}  {name}  [{unit}]  {meaning}\n" for where, name, unit, meaning in rows]
    matching = [line for line in lines if (text or "").lower() in line.lower()]
    if not matching:
        raise SettingsError(
            f"no figure has {text!r} in its name or meaning; `nyala metrics` lists all"
        )
    return "".join(matching)


def metrics_as_markdown() -> str:
    """Write the tables of docs/metrics.md."""
    head = ("key", "unit", "meaning")
    parts = [
        "## Keys of metrics.jsonl",
        markdown.table(head, [(f"`{f.key}`", f.unit, f.meaning) for f in _sorted()]),
    ]
    for page, metrics in PAGES.items():
        rows = [
            (f"`{_shown(metric)}`", metric.kind, metric.unit, metric.meaning) for metric in metrics
        ]
        parts += [f"### {page}", markdown.table(("metric", "kind", "unit", "meaning"), rows)]
        if page == "Every role":
            parts.insert(2, "## Metrics for Prometheus")
    return "\n\n".join(parts) + "\n"


def _sorted() -> list[Figure]:
    return sorted(FIGURES, key=lambda figure: figure.key)


def _shown(metric: Metric) -> str:
    return f"{metric.name}{{{metric.label}}}" if metric.label else metric.name
