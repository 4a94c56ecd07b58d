"""A network of a test's own: an address with names, all ports free, and nobody else."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.waiting import wait_until

ADDRESS = "10.77.0.1"


class OwnNetwork:
    """Namespaces that a sleeping process keeps, for commands of the test (Linux, no root needed).

    Args:
        folder: Empty.
        names: Of `ADDRESS`.
        route: It has a default route, which leads nowhere.
    """

    def __init__(self, folder: Path, *names: str, route: bool = True) -> None:
        hosts, ready = folder / "hosts", folder / "ready"
        hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} {' '.join(names)}\n")
        inside = (
            f"mount --bind {hosts} /etc/hosts; ip link set lo up",
            "ip link add out type veth peer name in; ip link set in up; ip link set out up",
            f"ip address add {ADDRESS}/24 dev out",
            "ip route add default dev out" if route else "true",
            f"touch {ready}; exec sleep 3600",
        )
        self._holder = subprocess.Popen(["unshare", "-rmn", "sh", "-euc", "; ".join(inside)])
        wait_until(ready.exists)

    @property
    def inside(self) -> list[str]:
        """What stands before a command that runs in it."""
        enter = ["nsenter", f"--target={self._holder.pid}", "--user", "--preserve-credentials"]
        return [*enter, "--mount", "--net", "--wd=.", "--"]

    @property
    def as_machine(self) -> list[str]:
        """The same, and whatever the command starts ends with it, as when a machine is lost."""
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return [*self.inside, *alone, "sh", "-c", '"$@"; exit $?', "machine"]

    def close(self) -> None:
        """End it; commands inside go on until they are ended."""
        self._holder.kill()
        self._holder.wait(30)
