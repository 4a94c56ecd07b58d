"""`nyala up` with stand-ins for the roles; no model is made.

`python -m tests.console.support.up_with_stand_ins BEHAVIOURS ARGUMENT...`; BEHAVIOURS is JSON
from the name of a process, or `actor-watch`, to how it behaves.
"""

import json
import os
import sys
from contextlib import nullcontext

from console.main import app
from console.run.actor_watch import ActorWatch
from console.run.process import Command
from console.verbs import session, up


def stand_ins(settings, folder):
    behaviours = json.loads(sys.argv[1])
    names = ["broker", "learner", *(f"actor-{n}" for n in range(settings.actors.count))]
    return [
        Command(
            name,
            name.partition("-")[0],
            (
                *(sys.executable, "-m", "tests.console.support.stand_in", name.partition("-")[0]),
                *(str(folder.path), str(settings.run.steps), behaviours.get(name, "")),
            ),
            folder.log(name),
            dict(os.environ),
        )
        for name in names
    ]


def die(*_):
    raise RuntimeError("out of luck")


if __name__ == "__main__":
    if "actor-watch" in json.loads(sys.argv[1]):
        ActorWatch._look = die  # type: ignore[method-assign]
    session.commands = stand_ins  # type: ignore[attr-defined]
    session.make_if_needed = lambda *_, **__: False  # type: ignore[attr-defined]
    setattr(up, "fork_server_of", lambda _: nullcontext())  # noqa: B010 - no fork imports us
    app(["up", *sys.argv[2:]], prog_name="nyala")
