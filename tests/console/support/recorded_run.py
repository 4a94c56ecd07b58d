"""The demo at its batch 47, as a real run left it: files with the keys that are shown, and the
answer of its store (`nyala status --json`)."""

import json
from pathlib import Path
from typing import Any

from buffer.operations.values import ActorSeen, ClaimCounts, EvalCounts, RedisMemory, Stats
from buffer.sampling import groups_in_flight
from configs.loader import load
from console.display.progress import NewestSample, RunProgress
from console.display.snapshot import GroupsInFlight, View
from console.run.run_folder import RunFolder

FOLDER = RunFolder(Path(__file__).parents[1] / "display" / "recorded")
SETTINGS = load(Path("configs/demo.yaml"))


def rows(name: str = "metrics") -> list[dict[str, Any]]:
    """Lines of one of its files."""
    text = (FOLDER.path / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def recorded_view(**changes: Any) -> View:
    """The run as `nyala up` had it."""
    store = json.loads((FOLDER.path / "store.json").read_text())
    tasks = store["tasks"]
    claims = tuple(ClaimCounts(**claim) for claim in tasks["claims"])
    stats = Stats(**{**tasks, "claims": claims, "eval": EvalCounts(**tasks["eval"])})
    view: dict[str, Any] = {
        "progress": RunProgress(FOLDER, steps=SETTINGS.run.steps).read_progress(),
        "stages": {},
        "actors_alive": 2,
        "actors": tuple(ActorSeen(**actor) for actor in store["actors"]),
        "silent_after_s": 5.0,
        "fill": GroupsInFlight(
            **groups_in_flight(stats, SETTINGS.run, SETTINGS.buffer),
            memory=RedisMemory(**store["memory"]).share,
        ),
        "sample": NewestSample(FOLDER.samples).read_newest(),
    }
    return View(**(view | changes))
