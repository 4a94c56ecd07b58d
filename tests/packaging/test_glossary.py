"""The glossary: each term once, names of the code that exist, and the words of other projects."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Entry(NamedTuple):
    """A row of the glossary."""

    term: str
    meaning: str
    code: str
    elsewhere: str


def entries() -> list[Entry]:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [Entry(*row) for row in cells if row[0] not in {"term", "---"}]


def exists(name: str) -> bool:
    """Whether a module, or a class in one, has this name."""
    path, last = name.replace(".", "/"), name.rpartition(".")[2]
    if (ROOT / path).is_dir() or (ROOT / f"{path}.py").is_file():
        return True
    module = (ROOT / path).parent.with_suffix(".py")
    if not module.is_file():
        return False
    body = ast.parse(module.read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.ClassDef) and node.name == last for node in body)


def test_each_term_stands_once() -> None:
    terms = [entry.term for entry in entries()]

    assert len(terms) > 50
    assert len(terms) == len(set(terms))


def test_what_the_glossary_names_in_the_code_exists() -> None:
    missing = [e.code for e in entries() if not exists(e.code.strip("`"))]

    assert missing == []
    assert not exists("learner.loop.Lop")


@pytest.mark.parametrize(
    ("word", "term"),
    [
        # TRL, verl, prime-rl, AReaL
        ("rollout worker", "actor"),
        ("generator", "actor"),
        ("trainer", "learner"),
        ("actor (verl)", "learner"),
        ("orchestrator", "broker"),
        ("inference engine", "engine"),
        ("rollout", "episode"),
        ("trajectory", "episode"),
        ("response", "completion"),
        ("reward function", "reward"),
        ("value head", "critic"),
        ("ref model", "reference policy"),
        ("staleness", "policy lag"),
        ("off-policy steps", "policy lag"),
        ("rollout correction", "correction"),
        ("TIS", "correction"),
        ("loss type", "surrogate"),
        ("old policy", "behaviour policy, μ"),
        ("gradient accumulation step", "microbatch"),
        ("weight sync", "publication"),
        ("in-flight weight update", "swap"),
        ("eval accuracy", "held-out score"),
        ("partial rollout", "chunk"),
        ("config", "settings"),
        # distributed systems
        ("fencing token", "fence"),
        ("visibility timeout", "lease"),
        ("poison message", "dead letter"),
        ("nack", "release"),
        ("ack", "commit"),
        ("leader generation", "lineage"),
        ("graceful shutdown", "drain"),
        ("keep-alive", "heartbeat"),
        ("fault injection", "chaos"),
    ],
)
def test_a_word_of_other_projects_leads_to_ours(word: str, term: str) -> None:
    leading = [e.term for e in entries() if word in re.split(r", (?![^(]*\))", e.elsewhere)]

    assert term in leading
