"""Commands of `nyala` in README and docs/ have verbs, options and settings that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise

import pytest

from configs.settings import Settings
from console.command_line import VERBS
from console.main import _load
from tests.newcomer.pages import PAGES, ROOT

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\S*/)?(?:nyala|run) (?=[a-z])")
OWN = {
    "demo",
    "setup",
    "check",
    "test",
    "test-containers",
    "test-gpu",
    "test-long",
    "watch",
    "VERB",
}
"""Verbs of `./run` itself."""
END = re.compile(r" (?:\||>|2>|&&|&|<) ?")
"""Whatever follows a command of ours on its line."""


def commands(page: str) -> Iterator[list[str]]:
    """Find the commands of a page's blocks, as words behind `nyala`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in (block for language, block in BLOCK.findall(text) if language in {"", "sh"}):
        for line in block.replace("\\\n", " ").splitlines():
            if COMMAND.match(line):
                words = shlex.split(END.split(COMMAND.sub("", line))[0], comments=True)
                if words[0] not in OWN:
                    yield words


def problem(words: list[str]) -> str | None:
    """Name what is wrong with a command, without running it."""
    verb, *rest = words
    if verb not in VERBS:
        return f"{verb} is not a verb"
    command = _load(verb)
    while rest and (below := getattr(command, "commands", {}).get(rest[0])):
        command, rest = below, rest[1:]
    known = {flag for each in command.params for flag in each.opts + each.secondary_opts}
    given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
    if unknown := given - known - {"-h", "--help"}:
        return f"{' '.join(words)}: no option {unknown}"
    settings = [after for word, after in pairwise(rest) if word == "--set"]
    names = {text.partition("=")[0] for text in settings if "..." not in text}
    unknown = {name for name in names if not has_setting(name)}
    return f"{' '.join(words)}: no setting {unknown}" if unknown else None


def has_setting(name: str) -> bool:
    """Whether `table.key` exists, whatever lies below it."""
    table, key = (*name.split("."), "")[:2]
    field = Settings.model_fields.get(table)
    return field is not None and key in getattr(field.annotation, "model_fields", {})


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_can_be_given(page: str) -> None:
    assert [wrong for words in commands(page) if (wrong := problem(words))] == []


def test_commands_are_found() -> None:
    found = {words[0] for page in PAGES for words in commands(page)}

    assert {"up", "status", "samples", "checkpoint", "keys", "doctor", "report"} <= found


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("upp mine.yaml", "upp is not a verb"),
        ("up mine.yaml --dry", "no option {'--dry'}"),
        ("up mine.yaml --set learner.rate=1", "no setting {'learner.rate'}"),
        ("buffer dead list runs/demo --far", "no option {'--far'}"),
        ("up mine.yaml --set run.steps=5 --fresh", None),
    ],
)
def test_what_does_not_exist_is_found(command: str, wrong: str | None) -> None:
    found = problem(command.split())

    assert found is None if wrong is None else wrong in str(found)
