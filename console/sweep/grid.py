"""The runs of a sweep: every combination of the values, each with a name that its values make.

A name depends on nothing but its own values, so a sweep that is typed again, or with further
values, finds the runs that it has already made.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from configs.errors import SettingsError

MAX_RUNS = 256  # of one sweep: more is a mistake, such as ranges written out
LONGEST_NAME = 63
DIGEST_CHARACTERS = 8
OPENING, CLOSING, QUOTES = "[{", "]}", "'\""


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting and its values."""

    path: str
    values: tuple[str, ...]
    """As they were typed."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    name: str
    values: Mapping[str, str]
    """Path of a setting -> its value."""

    @property
    def overrides(self) -> list[str]:
        """Its values as `--set` takes them."""
        return [f"{path}={value}" for path, value in self.values.items()]


def parse_axis(text: str) -> Axis:
    """Read `learner.lr=1e-6,3e-6`.

    Raises:
        SettingsError: It is nothing of the kind.

    Example:
        >>> parse_axis("learner.offload=[],[parameters, activations]").values
        ('[]', '[parameters, activations]')
    """
    path, equals, values = text.partition("=")
    found = [value.strip() for value in _split(values)]
    if not equals or "." not in path or not all(found) or len({*found}) < len(found):
        raise SettingsError(
            f"--over must be a setting and its values, each once, got {text!r}; write "
            "--over learner.lr=1e-6,3e-6"
        )
    return Axis(path.strip(), tuple(found))


def grid(axes: Sequence[Axis], *, base: str) -> list[Point]:
    """Combine all values of all axes; the last axis changes fastest.

    Args:
        axes: What changes.
        base: Name that the names of the runs begin with.

    Raises:
        SettingsError: A setting is there twice, there are too many runs, or there is none.
    """
    paths = [axis.path for axis in axes]
    if not axes or len({*paths}) < len(paths):
        raise SettingsError(
            f"a sweep must have settings to change, each once, got {paths}; write "
            "--over learner.lr=1e-6,3e-6"
        )
    combinations = product(*(axis.values for axis in axes))
    points = [named_point(dict(zip(paths, each, strict=True)), base) for each in combinations]
    if len(points) > MAX_RUNS:
        raise SettingsError(
            f"a sweep must have at most {MAX_RUNS} runs, got {len(points)}; leave values out"
        )
    return points


def named_point(values: Mapping[str, str], base: str) -> Point:
    """Return a point with the name that its values make."""
    ends = [path.rpartition(".")[2] for path in values]
    short = ends if len({*ends}) == len(ends) else list(values)
    text = "-".join(f"{name}_{value}" for name, value in zip(short, values.values(), strict=True))
    name = f"{base}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', text)}"
    if name != f"{base}-{text}" or len(name) > LONGEST_NAME:
        # What was replaced or cut off may be all that tells two runs apart.
        digest = hashlib.blake2b(repr(sorted(values.items())).encode()).hexdigest()
        name = f"{name[: LONGEST_NAME - DIGEST_CHARACTERS - 1]}-{digest[:DIGEST_CHARACTERS]}"
    return Point(name, values)


def _split(text: str) -> list[str]:
    """Split at commas that are outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in QUOTES:
            quote = character
        depth += (character in OPENING) - (character in CLOSING) if not quote else 0
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts
