"""Survival rate of a sample of mutants, with its interval, and the survivors by line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from .explained import EXPLAINED
from .targets import ROOT
from .trial import SURVIVED, Trial

Z = 1.96  # of a 95 % interval


def survivors(trials: Sequence[Trial]) -> list[str]:
    """Return a line for each mutant that no test noticed and no reason explains."""
    lines = []
    for trial in trials:
        mutant = trial.mutant
        source = (ROOT / mutant.file).read_text()
        old, new = mutant.old_line(source), mutant.new_line(source)
        is_explained = any(e[:3] == (mutant.file, old, new) for e in EXPLAINED)
        if trial.outcome == SURVIVED and not is_explained:
            where = f"{mutant.file}:{mutant.number(source)}"
            lines.append(f"{where} [{mutant.kind}]  {old}  ->  {new or '(nothing)'}")
    return lines


def summary(trials: Sequence[Trial], *, of: int) -> dict[str, object]:
    """Sum up trials.

    Args:
        trials: Of a random sample.
        of: Mutants that there are in all.
    """
    left = survivors(trials)
    low, high = interval(len(left), len(trials))
    return {
        "mutants": of,
        "tried": len(trials),
        "outcomes": dict(Counter(trial.outcome for trial in trials)),
        "survived": len(left),
        "survival_rate": round(len(left) / max(1, len(trials)), 4),
        "interval": [round(low, 4), round(high, 4)],
        "hours": round(sum(trial.took_s for trial in trials) / 3600, 2),
    }


def interval(hits: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of a share.

    Source:
        Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if of == 0:
        return 0.0, 1.0
    share, z2 = hits / of, Z * Z
    centre = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = Z * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of)) / (1 + z2 / of)
    return max(0.0, centre - half), min(1.0, centre + half)
