"""The evidence of a real run of `configs/demo.yaml`, and what faults make of it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from configs.loader import load
from configs.settings import Settings
from learner.reporting.advice.advisor import Advisor
from learner.reporting.advice.evidence import ActorShare, Advice, Evidence, StoreFigures

ROOT = Path(__file__).parents[4]
RECORDED = Path(__file__).with_name("demo_evidence.jsonl.gz")
"""All batches of `./run demo` on two busy cores, 2026-11-23."""

Fault = Callable[[Evidence], Mapping[str, Any]]
"""Fields of a batch that a fault changes."""


@cache
def demo() -> tuple[Evidence, ...]:
    """Read the recorded run."""
    with gzip.open(RECORDED, "rt") as file:
        return tuple(_read(json.loads(line)) for line in file)


def demo_settings(**overrides: object) -> Settings:
    """Load the demo's settings, with `table__key` changed."""
    changes = [f"{name.replace('__', '.')}={value}" for name, value in overrides.items()]
    return load(ROOT / "configs" / "demo.yaml", changes)


def broken(fault: Fault, *, begin: int = 20, batches: int = 60) -> list[Evidence]:
    """Return the demo's batches, those from `begin` on with a fault."""
    return [replace(e, **(fault(e) if e.step >= begin else {})) for e in demo()[:batches]]


def considered(settings: Settings, batches: list[Evidence]) -> list[tuple[Advice, ...]]:
    """Return the advice after each batch."""
    advisor = Advisor(settings)
    return [advisor.consider(each) for each in batches]


def _read(fields: dict[str, Any]) -> Evidence:
    fields["varying_parts"] = tuple(fields["varying_parts"])
    fields["actors"] = {name: ActorShare(**share) for name, share in fields["actors"].items()}
    fields["store"] = store = StoreFigures(**fields["store"])
    return Evidence(**fields, looks=1, workless=not store.leased)
