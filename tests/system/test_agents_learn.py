"""`nyala up` alone trains a live agent: OpenAI's client, two tools, several calls in a turn."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from tests.system.support.live_run import TORCH, LiveRun

pytestmark = [pytest.mark.live, pytest.mark.timeout(500)]

PARALLEL = '}}</tool_call><tool_call>{"name":"set"'
SHORT = ("run.steps=14", "run.eval_every=14", "run.eval_samples=0")


def test_one_command_teaches_an_agent_to_call_its_tools_in_parallel(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, "agent.yaml", *TORCH, *SHORT)

    with run.up() as up:
        run.wait_until(lambda: up.poll() is not None, "the run ends", within_s=400)

    assert up.returncode == 0, run.logs()
    metrics, log = run.lines("metrics"), (tmp_path / "up.log").read_text()
    assert "agents: hosting agents" in log
    assert "starts again" not in log, log
    shares = [line["reward_parts"]["parallel"] for line in metrics]
    assert fmean(shares[-3:]) >= max(0.5, fmean(shares[:3]) + 0.1), shares
    assert all(line["reward_mean"] == line["reward_parts"]["exact"] for line in metrics)
    before, after = (line["accuracy"] for line in run.lines("eval"))
    assert after >= before + 0.3
    shown = run.ask("samples", str(run.folder), "--best", "-n", "1")
    assert PARALLEL in "".join(shown.split()), shown  # lines are wrapped
