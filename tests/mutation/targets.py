"""Source files that decide, and the tests that must notice when they decide otherwise.

The stages of a target run in order until one fails; the quick ones come first, since most mutants
are noticed by them. The simulation is left out: it takes as long as all others together, for the
few that those have missed; play it against the survivors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .lua_mutants import lua_mutants
from .mutant import Mutant
from .python_mutants import python_mutants

ROOT = Path(__file__).parents[2]
NOT_LIVE = ("-m", "not live")
FAST = ("-m", "not live and not slow")


class Target(NamedTuple):
    """Files, as patterns from the root of the checkout, and arguments of pytest."""

    files: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...]


# Tests that look for a text in the scripts fail for every mutant of it, and notice nothing.
OF_TEXTS = ("planted_bug", "a_store_that_differs", "broken_protocol", "of_a_text_that_is_gone")
BEHAVIOUR = ("-k", " and ".join(f"not {name}" for name in OF_TEXTS))
WITHOUT_LUA = ("--ignore=tests/buffer/client", "--ignore=tests/buffer/test_codec.py")

STORE = (
    ("tests/buffer/test_model.py", *BEHAVIOUR),
    ("tests/buffer", *FAST, *BEHAVIOUR, *WITHOUT_LUA),
    ("tests/broker", "tests/learner/data", *FAST),
    ("tests/buffer", "tests/simulation/test_memory_redis.py", *NOT_LIVE, *BEHAVIOUR, *WITHOUT_LUA),
)
LEASING = ("tests/broker/test_decisions.py", "tests/broker/server", "tests/broker/test_life.py")
BROKER = (
    (*LEASING, *FAST),
    ("tests/broker", *FAST),
    ("tests/broker", *NOT_LIVE),
)
STORIES = tuple(f"test_{x}.py" for x in ("sealed_batches", "unfit_groups", "filtered_groups"))
CLAIMS = (
    (*(f"tests/learner/data/{x}" for x in ("test_claims.py", *STORIES, "test_ledger.py")), *FAST),
    ("tests/learner/data", *FAST),
    ("tests/learner/data", "tests/learner/test_loop.py", *NOT_LIVE),
    ("tests/system/test_rewind.py", *NOT_LIVE),
)
RECOVERY = ("test_recovery.py", "test_checkpoint.py", "test_rollback.py")
CHECKPOINTS = (
    (
        "tests/configs/test_durable.py",
        *(f"tests/learner/checkpointing/{x}" for x in RECOVERY),
        *FAST,
    ),
    ("tests/learner/checkpointing", *FAST),
    ("tests/learner/checkpointing", *NOT_LIVE),
    ("tests/learner/model/test_ranks.py", "tests/learner/training/test_critic.py", *NOT_LIVE),
    ("tests/system/test_rewind.py", *NOT_LIVE),
)

TARGETS = (
    Target(("buffer/lua/**/*.lua",), STORE),
    Target(("broker/server/leasing.py", "broker/server/liveness.py"), BROKER),
    Target(
        ("learner/data/claims.py", "learner/data/ledger.py", "learner/data/group_filter.py"), CLAIMS
    ),
    Target(
        (
            "configs/durable.py",
            "learner/checkpointing/checkpoint.py",
            "learner/checkpointing/manifest.py",
            "learner/checkpointing/tensors.py",
            "learner/checkpointing/verification.py",
            "learner/checkpointing/recovery.py",
            "learner/checkpointing/resume.py",
        ),
        CHECKPOINTS,
    ),
    Target(
        ("broker/weights/sparse.py",),
        (("tests/weights/test_sparse.py", *NOT_LIVE), ("tests/weights", *FAST)),
    ),
    Target(
        ("actors/capacity.py",),
        (("tests/actors/capacity",), ("tests/actors/test_loop.py", *FAST)),
    ),
    Target(
        ("configs/fleet.py",),
        (
            ("tests/configs/fleet/test_wanted.py", "tests/configs/fleet/test_meter.py"),
            ("tests/configs/fleet", *FAST),
        ),
    ),
)


def all_mutants(root: Path = ROOT) -> Iterator[tuple[Mutant, Target]]:
    """Make all mutants of all targets, in the order of their files."""
    for target in TARGETS:
        for pattern in target.files:
            for path in sorted(root.glob(pattern)):
                file, source = str(path.relative_to(root)), path.read_text()
                make = lua_mutants if path.suffix == ".lua" else python_mutants
                for mutant in make(file, source):
                    yield mutant, target
