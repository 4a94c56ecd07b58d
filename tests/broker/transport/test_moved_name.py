"""A name in `broker.endpoint` leads to where the broker is now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import needs

MOUNT = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'


def mounts(hosts: Path, *command: str) -> list[str]:
    """A command that sees a hosts file of its own."""
    return ["unshare", "--mount", "sh", "-c", MOUNT, "sh", str(hosts), *command]


@needs("root")  # for a mount namespace
@pytest.mark.slow
def test_a_name_is_resolved_anew_when_its_broker_has_moved(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_bytes(Path("/etc/hosts").read_bytes())
    command = mounts(hosts, sys.executable, "-m", "tests.broker.support.moved_name")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=90, check=False
    )

    assert ended.returncode == 0, ended.stderr
