"""Blocks of the documents as the files of a newcomer's folder.

A block goes into the file that its first line names (`# env.py`), or that the line before it ends
with (`questions.jsonl`:). A block of settings without a name goes over the settings of the README.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted(["README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))])
SETTINGS = "mine.yaml"
FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
BEFORE = re.compile(r"`([\w.-]+)`:$")
FIRST_LINE = re.compile(r"# ([\w.-]+)\n")


class Block(NamedTuple):
    """One block of a page."""

    language: str
    file: str | None
    text: str


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, such as `docs/data.md`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [_block(match, text[: match.start()]) for match in FENCE.finditer(text)]


def _block(match: re.Match[str], before: str) -> Block:
    named = FIRST_LINE.match(match["text"]) or BEFORE.search(before.rstrip())
    return Block(match["language"], named[1] if named else None, match["text"])


def write_project(folder: Path, pages: Sequence[str]) -> Path:
    """Copy the blocks of these pages into a folder; return its settings."""
    settings: dict[str, Any] = {}
    for page in pages:
        for block in blocks_of(page):
            if block.language == "yaml" and block.file in {None, SETTINGS}:
                for table, keys in yaml.safe_load(block.text).items():
                    settings.setdefault(table, {}).update(keys)
            elif block.file is not None:
                with (folder / block.file).open("a", encoding="utf-8") as file:
                    file.write(block.text)
    path = folder / SETTINGS
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return path
