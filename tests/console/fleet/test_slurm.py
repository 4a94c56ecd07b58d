"""The hub's job under Slurm: where actors find it, and when it is queued again.

`hostname`, `srun`, `scontrol` and `nyala` are stood in for: only the script is of interest here.
`tests/system/slurm.py` runs it on a real Slurm.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from configs.loader import load
from configs.settings import Settings
from console.verbs.fleet import render

NODE = "node7.example.org"
STOPPED = 130
"""Code of `nyala up` that SIGTERM ended."""


def ended(folder: Path, code: int = 0, **run: object) -> tuple[list[str], str, int]:
    """Run the job to its end; what `nyala` was given, what Slurm was asked, and the exit code."""
    settings = Settings.model_validate({"run": {"name": "far", "model": "m", **run}})
    render(settings, "slurm", folder / "slurm")
    commands = {
        "hostname": f"echo {NODE}",
        "srun": 'exec "$@"',
        "scontrol": 'echo "$@" >>asked',
        "nyala": f'for word; do echo "$word"; done >given; exit {code}',
    }
    (folder / "bin").mkdir()
    for name, text in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    done = subprocess.run(
        [str(folder / "slurm" / "hub.sh")],
        cwd=folder,
        env=os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    asked = folder / "asked"
    given = (folder / "given").read_text().split("\n")[:-1]
    return given, asked.read_text() if asked.exists() else "", done.returncode


@pytest.mark.parametrize(
    ("code", "asked"),
    [(0, ""), (1, ""), (2, ""), (STOPPED, "requeue 7\n"), (143, "requeue 7\n")],
)
def test_a_hub_is_queued_again_where_it_was_told_to_go(
    tmp_path: Path, code: int, asked: str
) -> None:
    assert ended(tmp_path, code)[1:] == (asked, code)


@pytest.mark.parametrize("is_trusted", [False, True])
def test_a_hub_has_the_name_of_its_node(tmp_path: Path, is_trusted: bool) -> None:
    words, _, _ = ended(tmp_path, trusted_network=is_trusted)

    changes = [word for word in words if "=" in word and not word.startswith("--")]
    hub = load(tmp_path / "slurm" / "config.yaml", changes)
    assert (tmp_path / "slurm" / "hub").read_text() == f"{NODE}\n"
    assert hub.broker.advertise == NODE
    assert hub.learner.advertise == (None if is_trusted else NODE), "groups need its own address"
