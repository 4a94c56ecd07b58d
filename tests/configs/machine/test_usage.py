"""Memory and processor time of a process group and its children, from the files of /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs import machine
from configs.machine import LOOK_EVERY_S, UsageMeter

TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def write(folder: Path, pid: int, *, group: int, cpu_s: float, pages: int, parent: int = 0) -> None:
    """Write a process's file as Linux has it; its program's name has a bracket and a blank."""
    ticks = str(int(cpu_s * TICKS))
    fields = ["S", str(parent), str(group), *["0"] * 8, ticks, *["0"] * 9, str(pages)]
    (folder / str(pid)).mkdir(exist_ok=True)
    (folder / str(pid) / "stat").write_text(f"{pid} (a) b) {' '.join(fields)} 0\n")


def test_a_group_is_all_of_its_processes_with_their_children_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "PROCESSES", tmp_path)
    group, now = os.getpgrp(), [0.0]
    write(tmp_path, 1, group=group, cpu_s=10.0, pages=100)
    write(tmp_path, 2, group=group, cpu_s=5.0, pages=20)
    write(tmp_path, 3, group=group + 1, cpu_s=99.0, pages=999)
    (tmp_path / "4").mkdir()  # has just ended
    write(tmp_path, 5, group=5, cpu_s=1.0, pages=3, parent=2)  # as a reward's process
    write(tmp_path, 6, group=5, cpu_s=1.0, pages=4, parent=5)
    (tmp_path / "6" / "smaps_rollup").write_text(f"Rss: {PAGE} kB\nPss:   {PAGE >> 9} kB\n")
    meter = UsageMeter(clock=lambda: now[0])

    assert meter.read_usage().memory_bytes == 125 * PAGE, "of the last, which shares, its part"
    write(tmp_path, 1, group=group, cpu_s=22.0, pages=100)
    now[0] = LOOK_EVERY_S / 2
    assert meter.read_usage().cores == 0.0, "too early to look again"
    now[0] = LOOK_EVERY_S
    assert meter.read_usage().cores == pytest.approx(12.0 / LOOK_EVERY_S)
    for ended in (2, 5, 6):
        (tmp_path / str(ended) / "stat").unlink()
    write(tmp_path, 1, group=group, cpu_s=23.0, pages=50)
    now[0] = 2 * LOOK_EVERY_S
    assert meter.read_usage() == machine.Usage(50 * PAGE, 0.0), "never less than nothing"
