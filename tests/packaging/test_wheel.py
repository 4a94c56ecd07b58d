"""Contents of the wheel: our rooms, with the files that they read."""

import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {"actors", "agents", "broker", "buffer", "configs", "console", "learner"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run(
        [*build, "--directory", folder], cwd=ROOT, check=True, capture_output=True, timeout=120
    )
    (path,) = folder.glob("nyala-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_packages_are_ours(wheel):
    top = {name.partition("/")[0] for name in wheel.namelist()}

    assert {name for name in top if not name.endswith(".dist-info")} == ROOMS | {"nyala.py"}


def test_no_other_installed_package_has_the_name_of_a_room():
    owners = packages_distributions()

    assert set(owners.get("nyala", ())) <= {"nyala"}
    assert {room: set(owners.get(room, ())) - {"nyala"} for room in ROOMS} == {
        room: set() for room in ROOMS
    }


@pytest.mark.parametrize("pattern", ["buffer/lua/**/*.lua", "configs/*.yaml", "configs/*.json*"])
def test_files_that_the_code_reads_travel_with_it(wheel, pattern):
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)}

    assert files
    assert files <= set(wheel.namelist())


def test_the_command_is_registered(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]

    assert [line for line in wheel.read(name).decode().splitlines() if line] == [
        "[console_scripts]",
        "nyala = console.main:app",
    ]


def test_nobody_can_upload_it_by_accident(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]

    assert "Classifier: Private :: Do Not Upload" in wheel.read(name).decode()
