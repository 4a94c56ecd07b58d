"""compose.yaml, run and hurt: `python3 -m tests.containers.stages [STAGE...]`.

Wants `engine.sh start` first; `./run test-containers` does all of it. Prints a line for each check
and ends with `N passed, N failed`. Containers and volumes are removed before and after.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from configs.loader import load, save
from tests.containers.pods import KEPT, Pods
from tests.containers.ring import ROOT, Failed, Ring

HUB, ACTOR = "nyala-hub", "nyala-actor"
DEMO_STEPS = 300
DEMO = Ring("demo", {"NYALA_WORK": "./runs/containers", "NYALA_CONFIG": "work/demo.yaml"})
"""configs/demo.yaml, for as many batches as leave time to look at it."""
LONG = Ring("long", {"NYALA_WORK": "./tests/containers", "NYALA_CONFIG": "work/long.yaml"})
"""Of the small engine, with settings of a folder of one's own."""


@dataclass(slots=True)
class Report:
    """Counts and prints."""

    passed: int = 0
    failed: int = 0

    def __call__(self, name: str, holds: bool, detail: object = "") -> None:
        """Note one check."""
        self.passed += holds
        self.failed += not holds
        print(f"{'ok  ' if holds else 'FAIL'} {name}  {detail}", flush=True)


def up(ring: Ring, say: Report) -> None:
    """One command, from nothing, builds the image, makes the secrets and trains."""
    begin = time.monotonic()
    ring.up(2, "--build")
    say("up returns", True, f"{time.monotonic() - begin:.0f} s")
    for service, count in (("redis", 1), ("broker", 1), ("learner", 1), ("actor", 2)):
        took = ring.wait(f"{service} healthy", ring.healthy(service, count))
        say(f"{service} turns healthy", True, f"after {took:.0f} s more")
    say("batches advance", True, f"3 in {ring.advance(3):.0f} s")
    size = int(ring.docker("image", "inspect", "--format", "{{.Size}}", "nyala:cpu"))
    dangling = ring.docker("images", "--quiet", "--filter", "dangling=true").split()
    say("one image is left, and nothing beside it", not dangling, f"{size / 1e9:.2f} GB")


FACTS = r"""
id -u; grep -E '^(CapEff|NoNewPrivs):' /proc/self/status | tr -d '\n\t'; echo
find /srv/nyala/keys -type f -printf '%f:%m '; echo
for place in /srv/nyala /srv/nyala/runs; do touch $place/x 2>&1 | tail -c 22; rm -f $place/x; done
"""
SECRETS = {
    "broker": {"broker.key", "broker.pub", "learner.pub", "redis.url"},
    "learner": {"learner.key", "broker.pub", "learner.pub", "redis.url"},
    "actor": {"enrolment.key", "broker.pub"},
}


def facts(ring: Ring, say: Report) -> None:
    """What a container may do and see."""
    for service, secrets in SECRETS.items():
        user, bounds, files, *writes = ring.inside(service, "sh", "-c", FACTS).splitlines()
        say(f"{service} is not root", user == "1000", user)
        confined = bounds == "CapEff:0000000000000000NoNewPrivs:1"
        say(f"{service} has no capability and gets none", confined, bounds)
        modes = dict(file.split(":") for file in files.split())
        own = {name: mode for name, mode in modes.items() if not name.startswith("enrolment-")}
        own.pop("enrolment.pub", None)  # of the volume `allowed`
        say(f"{service} has its own secrets alone", own.keys() == secrets, sorted(own))
        secret = [mode for name, mode in own.items() if name.endswith((".key", ".url"))]
        say(f"{service}'s secrets are closed to others", set(secret) == {"600"}, secret)
        refused = sum("Read-only file system" in line for line in writes)
        say(f"{service} cannot change its image", refused >= 1, writes)
        host = ring.inspect(f"nyala-{service}-1")["HostConfig"]
        limits = {name: host[name] for name in ("Memory", "PidsLimit")}
        say(f"{service} has limits", all(limits.values()), limits)
    users = "for p in /proc/[0-9]*; do echo $(cat $p/comm) $(stat -c %U $p); done"
    found = ring.inside("redis", "sh", "-c", users)
    say("redis-server is not root", "redis-server redis" in found)
    say("an actor is not told of Redis", "REDIS" not in ring.inside("actor", "env"))


def look(ring: Ring, say: Report) -> None:
    """What a person asks of a run."""
    text = ring.inside("learner", "nyala", "status", f"runs/{ring.run}")
    say("`nyala status` describes it, with its actors", "batch" in text and "version" in text)
    keys = ring.inside("broker", "nyala", "keys", "list")
    say("`nyala keys list` has who enrolled", keys.count("enrolment") >= 2)
    audit = [line["event"] for line in ring.lines("logs/audit.jsonl")]
    say("the audit log is kept with the run", "actor joined" in audit, len(audit))


def kill(ring: Ring, say: Report) -> None:
    """One actor of two."""
    before = ring.step
    ring.docker("kill", "nyala-actor-1")
    say("batches go on without one actor", True, f"10 in {ring.advance(10):.0f} s, from {before}")


def scale(ring: Ring, say: Report) -> None:
    """More actors in the middle, then fewer."""
    ring.up(4, "--no-recreate")
    took = ring.wait("four healthy actors", ring.healthy("actor", 4))
    say("four actors are healthy", True, f"after {took:.0f} s")
    took = ring.wait("newcomers' episodes", lambda: len(ring.samplers(10)) > 2)
    say(
        "newcomers' episodes are trained",
        True,
        f"{dict(ring.samplers(10))} after {took:.0f} s more",
    )
    ring.up(1, "--no-recreate")
    say("one of them is enough", True, f"10 batches in {ring.advance(10):.0f} s")


def join(ring: Ring, say: Report) -> None:
    """An actor from elsewhere, which is then shut out."""
    pack = "runs/site-a.nyala"  # on a volume: nothing can be copied from a container's /tmp
    make = ("nyala", "join-pack", f"runs/{ring.run}", "--host", "broker", "--name", "site-a")
    ring.inside("broker", *make, "--out", pack, "--without-model")
    ring.compose("cp", f"broker:/srv/nyala/{pack}", "/tmp/site-a.nyala")
    ring.compose("run", "--detach", "--no-deps", "--name", "guest", "actor", "sleep", "600")
    join = "nyala actor ../runs/site-a.nyala >guest.log 2>&1; echo ended $? >>guest.log"
    place = ("--workdir", "/srv/nyala/scratch")
    ring.docker("exec", "--detach", *place, "guest", "sh", "-c", join)
    log = ("exec", "guest", "sh", "-c", "tail -n 2 scratch/guest.log 2>/dev/null; true")

    def has_ended() -> bool:
        return "\nended " in ring.docker(*log)

    took = ring.wait("the guest", lambda: len(ring.samplers(5)) > 1 or has_ended())
    whose = dict(ring.samplers(5))
    say("an actor joins with one file", len(whose) > 1, f"{whose} after {took:.0f} s")
    ring.inside("broker", "nyala", "keys", "revoke", "site-a")
    took = ring.wait("the guest's end", has_ended)
    say("a revoked one is shut out", True, f"after {took:.0f} s: {ring.docker(*log).strip()}")
    ring.docker("rm", "--force", "guest")


def kill_each(ring: Ring, say: Report) -> None:
    """Broker, learner and Redis, with SIGKILL from outside; the engine starts each again."""
    for service in ("broker", "learner", "redis"):
        before = ring.step
        ring.kill_processes(f"nyala-{service}-1")
        ring.wait(f"{service} again", ring.healthy(service))
        say(
            f"batches go on after kill -9 of {service}",
            True,
            f"{ring.advance(5):.0f} s, from {before}",
        )
    before = ring.step
    ring.compose("kill", "actor")
    ring.up(2, "--no-recreate")
    say(
        "batches go on after the death of all actors",
        True,
        f"{ring.advance(5):.0f} s, from {before}",
    )


def down(ring: Ring, say: Report) -> None:
    """All containers removed in the middle, and made anew."""
    begin = time.monotonic()
    ring.compose("down")
    before = ring.step
    ring.up(2)
    ring.advance(3)
    lives = {line["lineage"] for line in ring.lines("metrics.jsonl")}
    say(
        "up again resumes", len(lives) > 1, f"from batch {before}, {time.monotonic() - begin:.0f} s"
    )


def finish(ring: Ring, say: Report) -> None:
    """The end of the run, and what it leaves."""
    ring.wait("the learner's end", lambda: ring.ended("learner") is not None)
    say("the learner ends with 0", ring.ended("learner") == 0, ring.ended("learner"))
    summary = json.loads((ring.folder / "summary.json").read_text())
    ends = [summary[f"tasks_{end}"] for end in ("committed", "dropped", "dead", "cancelled")]
    tasks = {name: value for name, value in summary.items() if name.startswith("tasks")}
    say("every task has one end", summary["tasks_created"] == sum(ends), tasks)
    groups = Counter(group for line in ring.lines("batches.jsonl") for group in line["group_ids"])
    say("no group is trained twice", max(groups.values()) == 1, f"{len(groups)} groups")
    before, after = (summary[f"held_out_accuracy_{when}"] for when in ("before", "after"))
    say("accuracy has risen", after > before, f"{before:.2f} to {after:.2f}")


def pods(ring: Ring, say: Report) -> None:
    """Hub and actor as Kubernetes would run them, told to go, and started again."""
    pods = Pods(ring)
    pods.make_volumes()
    hub_spec, actor_spec = (pods.recipes.pod(name) for name in (HUB, ACTOR))
    (hub,), (actor,) = hub_spec["containers"], actor_spec["containers"]
    for _ in range(2):  # a pod that is started again finds its keys
        pods.start(HUB, hub_spec["initContainers"][0], "nyala-keys")
        code = int(ring.docker("wait", "nyala-keys"))
        ring.docker("rm", "nyala-keys")
        say("the init container leaves the keys", code == 0, code)
    pods.start(HUB, hub, HUB)
    took = ring.wait("a ready hub", lambda: pods.is_ready(HUB, hub))
    say("the hub turns ready", True, f"after {took:.0f} s")
    pods.start(ACTOR, actor, ACTOR)
    took = ring.wait("a ready actor", lambda: pods.is_ready(ACTOR, actor))
    say("an actor turns ready", True, f"after {took:.0f} s")
    run = Ring("pods", {}, folder_of=KEPT["runs"])
    say("batches advance", True, f"5 in {run.advance(5):.0f} s")
    code, took = pods.stop(ACTOR, ACTOR)
    say("an actor that is told to go drains", code == 0, f"ended with {code} after {took:.1f} s")
    code, took = pods.stop(HUB, HUB)
    say("a hub that is told to go ends in time", code in {0, 130, 143}, f"{code}, {took:.1f} s")
    before = run.step
    for name in (HUB, ACTOR):
        ring.docker("start", name)
    say(
        "both go on when they are started again",
        True,
        f"5 in {run.advance(5):.0f} s, from {before}",
    )
    pods.start(ACTOR, actor, "nyala-refused", secret_mode=0o400)
    code = int(ring.docker("wait", "nyala-refused"))
    log = ring.last_line("nyala-refused")
    say(
        "a Secret that cannot be read is named, with the remedy",
        code == 2 and "fsGroup" in log,
        log,
    )
    pods.remove()


def prepare(ring: Ring) -> None:
    """Write the demo's settings, and remove the images of earlier runs."""
    work = ROOT / "runs" / "containers"
    work.mkdir(parents=True, exist_ok=True)
    save(load(ROOT / "configs" / "demo.yaml", [f"run.steps={DEMO_STEPS}"]), work / "demo.yaml")
    (work / "demo.yaml").chmod(0o644)
    old = ring.docker("images", "--quiet", "nyala").split()
    if old:
        ring.docker("image", "rm", "--force", *old)
    ring.docker("image", "prune", "--force")


Stage = Callable[[Ring, Report], None]
STAGES: dict[str, list[tuple[Ring, Stage]]] = {
    "demo": [(DEMO, stage) for stage in (up, facts, look, kill, finish)],
    "pods": [(DEMO, pods)],
    "long": [(LONG, stage) for stage in (up, look, scale, join, kill_each, down, finish)],
}


def main() -> int:
    """Run the stages that were named, or all."""
    say = Report()
    prepare(DEMO)
    for name in sys.argv[1:] or STAGES:
        for ring, stage in STAGES[name]:
            begin = time.monotonic()
            if stage is up:
                ring.compose("down", "--volumes", "--remove-orphans")
            try:
                stage(ring, say)
            except (Failed, KeyError, ValueError, OSError) as error:
                say(f"{name}: {stage.__name__}", False, error)
                print(ring.compose("logs", "--tail", "15")[-8000:])
                if stage is up:
                    break
            print(f"     [{name}: {stage.__name__}, {time.monotonic() - begin:.0f} s]", flush=True)
        ring.compose("down", "--volumes", "--remove-orphans")
    print(f"{say.passed} passed, {say.failed} failed")
    return bool(say.failed)


if __name__ == "__main__":
    sys.exit(main())
