"""An `nvidia-smi` on the PATH: what a machine with cards answers, on one without."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = """#!/bin/sh
case "$*" in
  *=index,uuid,utilization*) row=", GPU-x, 83, 1024" ;;
  *=name*) answer="NVIDIA H100 80GB HBM3" ;;
  *=driver_version*) answer="{driver}" ;;
  *=memory.total*) answer=81559 ;;
esac
for index in {indices}; do echo "${{answer:-$index$row}}"; done
exit {code}
"""


def install_smi(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    driver: str = "580.65.06",
    cards: int = 1,
    fails: bool = False,
) -> None:
    """Let this machine have cards, of which all are visible."""
    path = folder / "nvidia-smi"
    indices = " ".join(map(str, range(cards)))
    path.write_text(SCRIPT.format(driver=driver, indices=indices, code=9 if fails else 0))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def hide_driver(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let this machine have no driver."""
    (folder / "nvidia-smi").unlink(missing_ok=True)
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    monkeypatch.setenv("PATH", str(empty))
