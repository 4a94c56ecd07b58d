"""Jobs of actors follow the number that the run wants; Slurm's commands are stood in for by files.

`tests/system/slurm.py` plays the rendered job on a real Slurm.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.loader import save
from configs.settings import Settings
from console.run.run_folder import RunFolder
from console.verbs.fleet import LOOK_S, MOST_AT_ONCE, MOST_FAILURES, SlurmFleet

COMMANDS = {
    "sbatch": 'echo "$@" >>asked; n=$(($(cat last) + 1)); echo $n >last; echo $n >>queue',
    "squeue": "cat queue",
    "scancel": 'echo scancel "$@" >>asked; for job; do sed -i "/^$job\\$/d" queue; done',
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run beside a Slurm without jobs, in the working folder."""
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    for name in ("cat", "sed"):  # and none of a Slurm of this machine
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    for name, text in (("queue", ""), ("last", "100\n"), ("asked", "")):
        Path(name).write_text(text)
    folder = RunFolder(tmp_path / "runs" / "far")
    folder.path.mkdir(parents=True)
    tables = {"run": {"name": "far", "model": "m"}, "fleet": {"min_actors": 2}}
    save(Settings.model_validate(tables), folder.config)
    return folder


def want(run: RunFolder, step: int, actors: int) -> None:
    line = {"step": step, "actors_wanted": actors, "actors_wanted_why": "learner idle 31%"}
    with run.metrics.open("a") as file:
        file.write(json.dumps(line) + "\n")


def asked() -> list[str]:
    lines = Path("asked").read_text().splitlines()
    Path("asked").write_text("")
    return lines


def test_jobs_are_started_and_ended_by_the_number_that_the_run_wants(run, capsys):
    fleet = SlurmFleet(run, Path("actor.sh"), ["--partition=spot"])

    fleet.adjust_jobs()
    assert asked() == ["--job-name=nyala-actor-far --partition=spot actor.sh"] * 2
    assert "fleet.min_actors: 2 wanted, 0 jobs" in capsys.readouterr().out
    want(run, 1, 5)
    fleet.adjust_jobs()
    assert len(asked()) == 3
    assert capsys.readouterr().out == "learner idle 31%: 5 wanted, 2 jobs\n"
    fleet.adjust_jobs()
    assert (asked(), capsys.readouterr().out) == ([], "")
    want(run, 2, 3)
    fleet.adjust_jobs()
    assert asked() == ["scancel 101 102"]
    want(run, 3, 500)
    fleet.adjust_jobs()
    assert len(asked()) == MOST_AT_ONCE


def test_a_slurm_that_refuses_is_named(run, tmp_path):
    refusal = "#!/bin/sh\necho 'invalid partition' >&2; exit 1\n"
    (tmp_path / "bin" / "sbatch").write_text(refusal)

    with pytest.raises(SettingsError, match="sbatch must succeed, got: invalid partition; change"):
        SlurmFleet(run, Path("actor.sh"), []).adjust_jobs()
    (tmp_path / "bin" / "sbatch").unlink()
    with pytest.raises(SettingsError, match=r"sbatch must answer within 60 s, got: .*No such file"):
        SlurmFleet(run, Path("actor.sh"), []).adjust_jobs()


def test_following_ends_with_the_run_and_bears_a_slurm_that_is_away_for_a_while(run, tmp_path):
    sbatch = tmp_path / "bin" / "sbatch"
    looks = iter(["want", "away", "away", "back", "end"])

    def pause(seconds: float) -> None:
        assert seconds == LOOK_S
        match next(looks):
            case "want":
                want(run, 1, 4)
                sbatch.rename(tmp_path / "away")
            case "back":
                (tmp_path / "away").rename(sbatch)
            case "end":
                run.summary.write_text("{}")

    SlurmFleet(run, Path("actor.sh"), [], pause=pause).follow()

    assert len(asked()) == 4


def test_a_slurm_that_stays_away_ends_it(run, tmp_path):
    looks = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        want(run, len(looks), 9)
        (tmp_path / "bin" / "sbatch").unlink(missing_ok=True)

    with pytest.raises(SettingsError, match="sbatch must answer"):
        SlurmFleet(run, Path("actor.sh"), [], pause=pause).follow()
    assert len(looks) == 1 + MOST_FAILURES
