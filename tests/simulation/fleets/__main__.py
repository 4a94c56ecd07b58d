"""Three short runs in the simulator and in rates: `python -m tests.simulation.fleets`."""

from __future__ import annotations

import sys

from tests.simulation.fleets.compared import SCENARIOS, difference


def main() -> int:
    """Play all, print a line for each; 1 where a bound is missed."""
    found = [difference(name) for name in SCENARIOS]
    print(*found, sep="\n")
    return 0 if all(each.holds for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
