"""Program of an environment host: a class of the user, in a Python of its own.

    python .../program.py THREADS

`process.py` starts it. Frames come by standard input and go out by standard output, which are moved
to other descriptors before any code of the user runs: what that code prints goes to standard error.
The host can import Nyala's modules that know the forms of environments, which need no package. It
ends with its parent.
"""

from __future__ import annotations

import fcntl
import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

ROOT = Path(__file__).parents[3]
OURS = ("actors", "configs")
FIRST_DESCRIPTOR = 200  # above those of files that the user's code opens
OLD_PYTHON = 79
"""Exit status where our packages cannot be imported."""


class OurPackages:
    """Finds Nyala's packages, and no other package beside them, which is for another Python."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG004 - the protocol's
        """Find a package (`importlib.abc.MetaPathFinder`)."""
        return PathFinder.find_spec(name, [str(ROOT)]) if name in OURS else None


def main() -> None:
    """Serve until the input ends."""
    if sys.version_info < (3, 11):  # noqa: UP036 - not ours: the user's
        sys.exit(OLD_PYTHON)
    sys.meta_path.insert(0, OurPackages)
    import_module("configs.child").die_with_parent()
    if sys.path[:1] == [str(Path(__file__).parent)]:
        del sys.path[0]  # `import environment` means the user's
    requests, replies = (
        os.fdopen(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR), mode)
        for number, mode in ((0, "rb"), (1, "wb"))
    )
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    serving = import_module("actors.environments.hosted.serving")
    serving.serve(requests, replies, threads=int(sys.argv[1]))
    os._exit(0)  # at once: threads of the environment may never end


if __name__ == "__main__":
    main()
