"""The laboratory stays behind: it is in the checkout, in no wheel and no image."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERBS = """
import sys
sys.path[:] = [sys.argv[1], *(path for path in sys.path if path not in {"", sys.argv[2]})]
from console.main import app
app(sys.argv[3:])
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What a wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run(
        [*build, "--directory", folder], cwd=ROOT, check=True, capture_output=True, timeout=120
    )
    (path,) = folder.glob("nyala-*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def nyala(place: Path, *arguments: str, without: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", VERBS, place, without, *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_wheel_has_no_laboratory(installed):
    assert not (installed / "lab").exists()
    assert (installed / "console").exists()


def test_what_is_installed_has_no_verb_for_it(installed):
    shown = nyala(installed, "--help")
    called = nyala(installed, "chaos", "--help")

    assert shown.returncode == 0, shown.stderr
    assert "doctor" in shown.stdout
    assert "chaos" not in shown.stdout
    assert called.returncode != 0
    assert "No such command 'chaos'" in called.stderr


def test_a_checkout_has_its_verb():
    called = nyala(ROOT, "chaos", "--help", without=Path("nowhere"))

    assert called.returncode == 0, called.stderr
    assert "--only" in called.stdout


def test_the_image_is_built_without_it():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()

    assert "*" in lines
    assert "!console" in lines
    assert "!lab" not in lines


def test_no_room_imports_it():
    found = [
        str(path.relative_to(ROOT))
        for room in ("configs", "buffer", "broker", "actors", "learner", "console")
        for path in (ROOT / room).rglob("*.py")
        if any(
            line.lstrip().startswith(("from lab", "import lab"))
            for line in path.read_text(encoding="utf-8").splitlines()
        )
    ]

    assert found == []
