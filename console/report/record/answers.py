"""Answers to the same held-out questions, early and late in a run.

Which questions are shown is drawn, not chosen: the first by digest of those that became right, that
became wrong, and whose grade stayed, beside the number of each kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from learner.reporting.sample_lines import SampleLine

MAX_QUESTIONS = 4096  # of which two answers are held at a time
END_CHARACTERS = 900  # of a text: how it begins, and the answer at its end
EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer to a held-out question."""

    step: int
    """Batches that its policy was trained on."""
    grade: float
    """0 to 1 = right: the reward's part `exact`, or the reward where there is none."""
    reward: float
    text: str
    tokens: int
    finish: str


@dataclass(frozen=True, slots=True)
class Change:
    """A question with an early and a late answer."""

    question: str
    prompt: str
    note: str
    """What the environment sent along, such as the right answer."""
    early: Answer
    late: Answer


@dataclass(slots=True)
class Changes:
    """What became of the answers to the questions of a run."""

    first: int = 0
    last: int = 0
    """The steps of the two evaluations."""
    better: int = 0
    worse: int = 0
    same: int = 0
    shown: list[Change] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """Write how many of each kind there are."""
        return (
            f"Of {self.better + self.worse + self.same:,} questions that were asked after "
            f"{self.first:,} and after {self.last:,} batches, {self.better:,} were answered better "
            f"in the end, {self.worse:,} worse and {self.same:,} alike. Some of each kind, not "
            "chosen by hand:"
        )


def grade_of(line: SampleLine) -> float:
    """Grade an answer as the evaluation does."""
    return line.parts.get("exact", line.reward)


def changes_of(lines: Iterable[SampleLine]) -> Changes:
    """Compare the first with the last evaluation that was kept."""
    early: dict[str, SampleLine] = {}
    late: dict[str, SampleLine] = {}
    first = last = -1
    for line in lines:
        if line.kind != "eval" or line.sample != 0:
            continue
        if first < 0 or line.step == first:
            first = line.step
            if len(early) < MAX_QUESTIONS:
                early.setdefault(line.question, line)
        if line.step > last:
            last = line.step
            late = {}
        if line.step == last and line.question in early:
            late.setdefault(line.question, line)
    if last == first:
        return Changes()
    return _sorted(Changes(first, last), early, late)


def _sorted(changes: Changes, early: dict[str, SampleLine], late: dict[str, SampleLine]) -> Changes:
    """Count the questions of each kind, and show the first two or one of each."""
    kinds: dict[str, list[str]] = {"better": [], "worse": [], "right": [], "wrong": []}
    for question in sorted(late):
        before, after = grade_of(early[question]), grade_of(late[question])
        if after > before + EPSILON:
            kinds["better"].append(question)
        elif after < before - EPSILON:
            kinds["worse"].append(question)
        else:
            kinds["right" if after >= 1.0 - EPSILON else "wrong"].append(question)
    changes.better, changes.worse = len(kinds["better"]), len(kinds["worse"])
    changes.same = len(kinds["right"]) + len(kinds["wrong"])
    shown = kinds["better"][:2] + kinds["worse"][:1] + kinds["wrong"][:1] + kinds["right"][:1]
    changes.shown = [_change(early[question], late[question]) for question in shown[:4]]
    return changes


def _change(early: SampleLine, late: SampleLine) -> Change:
    note = ", ".join(f"{name}: {text}" for name, text in late.notes.items())
    return Change(late.question, cut(late.prompt), cut(note), _answer(early), _answer(late))


def _answer(line: SampleLine) -> Answer:
    return Answer(line.step, grade_of(line), line.reward, cut(line.text), line.tokens, line.finish)


def cut(text: str) -> str:
    """Leave out the middle of a long text."""
    left_out = len(text) - 2 * END_CHARACTERS
    if left_out <= 40:
        return text
    return f"{text[:END_CHARACTERS]}\n[... {left_out:,} characters ...]\n{text[-END_CHARACTERS:]}"
