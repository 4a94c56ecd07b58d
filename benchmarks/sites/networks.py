"""A hub and its sites, each a network of its own on this machine, with a far link to each site.

site-0 ══ link ══ hub ══ link ══ site-1      one address each; the hub's is the same to all
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import Self

from benchmarks.sites.link import Limits
from benchmarks.support.machine import REPOSITORY

HUB = "10.99.0.1"
TOOL_S = 10.0


class FarSites:
    """The networks and the links between them, until closed.

    Args:
        count: Of sites.
    """

    def __init__(self, count: int) -> None:
        self.hub = f"nyala-hub-{os.getpid()}"
        self.sites = [f"nyala-site-{os.getpid()}-{number}" for number in range(count)]
        self._links: list[subprocess.Popen[str]] = []
        self._stack = ExitStack()

    def address(self, number: int) -> str:
        """Return the address of a site."""
        return f"10.99.0.{number + 2}"

    def limit(self, limits: Limits) -> None:
        """Set what every link does from now on."""
        for link in self._links:
            assert link.stdin is not None
            link.stdin.write(json.dumps(asdict(limits)) + "\n")
            link.stdin.flush()

    def sent_bytes(self) -> int:
        """Return the bytes of all packets that the hub has sent to its sites, repetitions too."""
        return sum(self._sent_bytes(number) for number in range(len(self.sites)))

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name in (self.hub, *self.sites):
                _run("ip", "netns", "add", name)
                stack.callback(_run, "ip", "netns", "delete", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            for number, site in enumerate(self.sites):
                stack.callback(_end, self._connect(number, site))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _connect(self, number: int, site: str) -> subprocess.Popen[str]:
        device = f"far{number}"
        link = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sites.link", self.hub, site, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        assert link.stdout is not None
        if link.stdout.readline() != "open\n":
            raise RuntimeError("the link has not come up")
        for network, own, other in (
            (self.hub, HUB, self.address(number)),
            (site, self.address(number), HUB),
        ):
            _run("ip", "-n", network, "address", "add", own, "peer", other, "dev", device)
            _run("ip", "-n", network, "link", "set", device, "up")
        self._links.append(link)
        return link

    def _sent_bytes(self, number: int) -> int:
        command = ("ip", "-n", self.hub, "-s", "-j", "link", "show", f"far{number}")
        shown = subprocess.run(command, check=True, timeout=TOOL_S, capture_output=True)
        return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def _end(link: subprocess.Popen[str]) -> None:
    link.communicate(timeout=TOOL_S)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=TOOL_S)
