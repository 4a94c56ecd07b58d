"""A second network on this machine, with one link to the first: real partitions and slow links.

Made by the kernel, out of a namespace and a pair of virtual cards. Needs root and the `ip` command,
for a limit `tc` too; touches no other network.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

TOOL_S = 10.0
NUMBERS = 2**14
FIRST_OF_PROCESS = 16  # those below are given out by name
CLONE_NEWNET = 0x40000000
BURST, QUEUE = "2mb", "50ms"
"""What a card with a limit may send at once, and for how long a packet may wait before it."""


class SecondNetwork:
    """Addresses `here` and `there`, and the name of the network that `there` is in.

    Args:
        number: Distinguishes it from others of this machine; leftovers under it are removed.
            None = one of this process.
    """

    def __init__(self, number: int | None = None) -> None:
        if number is None:
            number = FIRST_OF_PROCESS + os.getpid() % (NUMBERS - FIRST_OF_PROCESS)
        subnet = f"10.{64 + number // 256}.{number % 256}"
        self.here, self.there = f"{subnet}.1", f"{subnet}.2"
        self.name = f"nyala-{number}"
        self.near, self.far = f"ny-near-{number}", f"ny-far-{number}"

    def cut(self) -> None:
        """Lose every packet silently."""
        self._there("link", "set", self.far, "down")

    def heal(self) -> None:
        """Let packets pass again."""
        self._there("link", "set", self.far, "up")

    def limit(self, bits_per_s: int) -> None:
        """Send no faster than this from here to there."""
        limit = ("rate", f"{bits_per_s}bit", "burst", BURST, "latency", QUEUE)
        _run("tc", "qdisc", "replace", "dev", self.near, "root", "tbf", *limit)

    def __enter__(self) -> Self:
        self._remove()
        try:
            _run("ip", "netns", "add", self.name)
            peer = ("peer", "name", self.far, "netns", self.name)
            _run("ip", "link", "add", self.near, "type", "veth", *peer)
            _run("ip", "address", "add", f"{self.here}/30", "dev", self.near)
            _run("ip", "link", "set", self.near, "up")
            self._there("address", "add", f"{self.there}/30", "dev", self.far)
            for card in ("lo", self.far):
                self._there("link", "set", card, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _there(self, *words: str) -> None:
        _run("ip", "-n", self.name, *words)

    def _remove(self) -> None:
        for words in (("link", "delete", self.near), ("netns", "delete", self.name)):
            subprocess.run(("ip", *words), check=False, timeout=TOOL_S, capture_output=True)


def obstacle(*, limits: bool = False) -> str | None:
    """Reason why there can be no second network here, or none with a limit; None = there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "it needs root and the `ip` command, to make a network"
    if limits and shutil.which("tc") is None:
        return "it needs the `tc` command, to limit what a card sends"
    probe = subprocess.run(
        ("unshare", "--net", "true"), check=False, capture_output=True, timeout=TOOL_S
    )
    return None if probe.returncode == 0 else "this kernel allows no network namespaces here"


def enter(name: str) -> None:
    """Move this thread, and those that it starts, into a network (`os.setns` is Python 3.12's)."""
    with Path(f"/run/netns/{name}").open() as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"network {name} cannot be entered")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=TOOL_S)
