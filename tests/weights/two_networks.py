"""A second network on this machine, with one link to the first that can be cut. Needs root."""

import os
import shutil
import subprocess

import pytest

TOOL_S = 10.0


class TwoNetworks:
    """Addresses `here` and `there`, and the name of the network that `there` is in."""

    def __init__(self) -> None:
        number = os.getpid() % 16384  # not those of another test that runs now
        subnet = f"10.{64 + number // 256}.{number % 256}"
        self.here, self.there = f"{subnet}.1", f"{subnet}.2"
        self.name = f"nyala-test-{number}"
        self._near, self._far = f"ny-near-{number}", f"ny-far-{number}"
        _ip("netns", "add", self.name)
        _ip("link", "add", self._near, "type", "veth", "peer", self._far, "netns", self.name)
        _ip("address", "add", f"{self.here}/30", "dev", self._near)
        _ip("link", "set", self._near, "up")
        _ip("-n", self.name, "address", "add", f"{self.there}/30", "dev", self._far)
        for link in ("lo", self._far):
            _ip("-n", self.name, "link", "set", link, "up")

    def cut(self) -> None:
        """Lose every packet, and tell nobody."""
        _ip("-n", self.name, "link", "set", self._far, "down")

    def heal(self) -> None:
        _ip("-n", self.name, "link", "set", self._far, "up")

    def close(self) -> None:
        _ip("link", "delete", self._near)
        _ip("netns", "delete", self.name)


@pytest.fixture(scope="module")
def networks():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("it needs root and the `ip` command, to make a network")
    probe = subprocess.run(
        ("unshare", "--net", "true"), check=False, capture_output=True, timeout=TOOL_S
    )
    if probe.returncode:
        pytest.skip("this kernel allows no network namespaces here")
    made = TwoNetworks()
    yield made
    made.close()


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, timeout=TOOL_S, capture_output=True)
