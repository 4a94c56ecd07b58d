"""Keys as container platforms mount them: root's files, read by a user of the image.

Each case is a real file, read by a real process of user 1000 that is in the groups 1000 and 2000.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.transport.keys import make_keys
from tests.broker.support.mounted_secret import mount
from tests.needs import needs

pytestmark = needs("root")  # gives files to others

OURS, OTHERS = 2000, 3000
READER = """
import json, os, sys
from pathlib import Path
from broker.transport.keys import load_pair
from configs.errors import SettingsError
os.setgroups([2000]); os.setgid(1000); os.setuid(1000)
outcomes = {}
for folder in map(Path, sys.argv[1:]):
    try:
        outcomes[folder.name] = load_pair(folder, "enrolment").secret.decode()
    except SettingsError as error:
        outcomes[folder.name] = str(error)
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, str]]:
    """What user 1000 gets from each mounted file; `secret` is what it holds."""
    with tempfile.TemporaryDirectory() as text:  # pytest's own folder is closed to other users
        place = Path(text)
        place.chmod(0o755)
        key = make_keys(place / "keys") / "enrolment.key"
        cases = {
            "fsGroup": (0, OURS, 0o440),
            "own group": (0, 1000, 0o440),
            "root alone": (0, 0, 0o400),
            "foreign group": (0, OTHERS, 0o440),
            "writable": (0, OURS, 0o460),
            "everybody": (0, OURS, 0o444),
            "own file": (1000, 1000, 0o400),
            "own file, open": (1000, OURS, 0o440),
            "another user": (1001, OURS, 0o440),
        }
        folders = [
            mount(place / name, [key], owner=owner, group=group, mode=mode)
            for name, (owner, group, mode) in cases.items()
        ]
        done = subprocess.run(
            [sys.executable, "-c", READER, *map(str, folders)],
            check=True,
            capture_output=True,
            timeout=60,
        )
        yield json.loads(done.stdout) | {"secret": key.read_text().strip()}


@pytest.mark.parametrize("case", ["fsGroup", "own group", "own file"])
def test_a_mounted_key_that_one_group_of_ours_reads_is_taken(
    outcomes: dict[str, str], case: str
) -> None:
    assert outcomes[case] == outcomes["secret"]


@pytest.mark.parametrize("case", ["writable", "everybody", "own file, open", "another user"])
def test_a_mounted_key_that_is_more_open_is_refused(outcomes: dict[str, str], case: str) -> None:
    assert "must be readable by its owner alone, got mode 04" in outcomes[case]


@pytest.mark.parametrize("case", ["root alone", "foreign group"])
def test_a_mounted_key_that_we_cannot_read_names_the_remedy(
    outcomes: dict[str, str], case: str
) -> None:
    assert outcomes["secret"] not in outcomes[case]
    if case == "root alone":
        assert "Permission denied; let user 1000 read it" in outcomes[case]
        assert "fsGroup" in outcomes[case]
