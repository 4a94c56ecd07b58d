"""Files of weights that processes have mapped, as the kernel counts their pages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from broker.weights.shared_memory import PREFIX


def shared_files(pid: int) -> dict[Path, Counter[str]]:
    """Return bytes of a process's mappings of files of weights, by file and field of smaps.

    Among the fields: `Rss`; `Pss`, in which a page counts in equal parts with each process that has
    it; `Private_Dirty`, pages of which the process has a copy.
    """
    found: dict[Path, Counter[str]] = {}
    path: Path | None = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            named = Path(words[5]) if len(words) > 5 else Path()
            is_ours = named.parent.name.startswith(PREFIX) and not named.name.endswith("(deleted)")
            path = named if is_ours else None
        elif path is not None and words[-1] == "kB":
            found.setdefault(path, Counter())[words[0][:-1]] += int(words[1]) * 1024
    return found
