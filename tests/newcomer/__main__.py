"""A newcomer's first hour, by a script that only copies: `python -m tests.newcomer`.

Clones this repository, sets the clone up, and in a folder elsewhere does what README and docs/ say:
a new project, and runs on data, a reward and an environment copied out of the pages. Every command
must end with 0. Prints the minutes of each step.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.newcomer.journeys import AGENT, JOURNEYS, QUICK, SMALL, TOOLS, flags
from tests.newcomer.pages import ROOT, write_project

LONGEST_S = 1200.0


def main() -> int:
    """Walk all ways; return 1 if one ended early."""
    with tempfile.TemporaryDirectory(prefix="newcomer-") as place:
        clone, folder = Path(place) / "nyala", Path(place) / "mine"
        folder.mkdir()
        steps = [("clone", ["git", "clone", "-q", str(ROOT), str(clone)], folder)]
        nyala = str(clone / "run")
        steps.append(("./run setup", [nyala, "setup"], folder))
        for journey in JOURNEYS:
            own = folder / journey.name
            own.mkdir()
            write_project(own, journey.pages)
            check = [nyala, "up", "mine.yaml", "--dry-run", *flags(journey)]
            steps.append((f"{journey.name}: --dry-run", check, own))
            steps.append((f"{journey.name}: run", [nyala, *QUICK, *flags(journey)], own))
        own = folder / TOOLS.name
        own.mkdir()
        write_project(own, TOOLS.pages)
        play = [nyala, "env", "test", "mine.yaml", "--policy", "echo", *flags(TOOLS)]
        steps.append(("tools: env test", play, own))
        own = folder / AGENT.name
        own.mkdir()
        write_project(own, AGENT.pages)
        check = [nyala, "up", "my_agent.yaml", "--dry-run", *flags(AGENT)]
        steps.append(("agent: --dry-run", check, own))
        train = [nyala, "up", str(clone / "configs" / "agent.yaml"), "--plain"]
        steps.append(("agent: run of the preset", train, folder))
        steps.append(("new", [nyala, "new", "fresh"], folder))
        short = [word for change in SMALL[1:4] for word in ("--set", change)]
        steps.append(("new: run", [nyala, "up", "fresh.yaml", "--plain", *short], folder / "fresh"))
        return walk(steps)


def walk(steps: list[tuple[str, list[str], Path]]) -> int:
    """Carry steps out one after the other."""
    began = time.monotonic()
    for name, command, folder in steps:
        at = time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,
            check=False,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
        print(f"{(time.monotonic() - at) / 60:6.2f} min  {name}", flush=True)
        if done.returncode != 0:
            print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
            print(f"{name} ended with {done.returncode}: {' '.join(command)}")
            return 1
    print(f"{(time.monotonic() - began) / 60:6.2f} min  in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
