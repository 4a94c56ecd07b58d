"""Hours of fleets in the model of rates: `python -m tests.configs.support.fleet --seeds 100`."""

from __future__ import annotations

import argparse
import sys

from tests.configs.support.fleet.hours import TRACES, compared


def main() -> int:
    """Play all traces, print a line for each; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    seeds = parser.parse_args().seeds
    results = [compared(trace, range(seeds)) for trace in TRACES]
    for result in results:
        print(result)
    return 0 if all(result.holds for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
