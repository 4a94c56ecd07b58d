"""Results that outlive a run: a line of JSON for each mutant tried, by which the next goes on."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .mutant import Mutant
from .targets import ROOT, Target
from .trial import Trial


class Key(NamedTuple):
    """A mutant by its text, which holds when other lines of its file move."""

    file: str
    old_line: str
    new_line: str
    nth: int
    """Of those in the file that read the same, from 0."""


def by_key(mutants: Iterable[tuple[Mutant, Target]]) -> dict[Key, tuple[Mutant, Target]]:
    """Give each mutant its key."""
    found: dict[Key, tuple[Mutant, Target]] = {}
    sources: dict[str, str] = {}
    counts = Counter[tuple[str, str, str]]()
    for mutant, target in mutants:
        file = mutant.file
        source = sources.setdefault(file, (ROOT / file).read_text())
        text = (file, mutant.old_line(source), mutant.new_line(source))
        found[Key(*text, counts[text])] = (mutant, target)
        counts[text] += 1
    return found


def in_random_order(keys: Iterable[Key], seed: int) -> list[Key]:
    """Shuffle, so that a mutant more or less leaves the order of the others as it was."""
    return sorted(keys, key=lambda key: hashlib.sha256(f"{seed} {key}".encode()).digest())


class Results:
    """Outcomes in a file, or only in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._tried: dict[Key, dict] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._tried[Key(*(entry[name] for name in Key._fields))] = entry

    def __contains__(self, key: Key) -> bool:
        return key in self._tried

    def add(self, key: Key, trial: Trial) -> None:
        """Keep a trial, in the file before this returns."""
        entry = key._asdict() | {"outcome": trial.outcome, "took_s": round(trial.took_s, 1)}
        self._tried[key] = entry
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                print(json.dumps(entry), file=file)

    def trial(self, key: Key, mutant: Mutant) -> Trial:
        """Return what became of a mutant that was tried."""
        entry = self._tried[key]
        return Trial(mutant, entry["outcome"], entry["took_s"])
