"""A real Prometheus beside a live run: it finds every role, and every query of ours has an answer.

Run beside CI, `pytest tests/system/monitoring.py`: it needs `prometheus` (Debian's package).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from console.run.redis_server import free_port
from tests.system.support.live_run import TORCH, LiveRun
from tests.waiting import wait_until

DEPLOY = Path(__file__).parents[2] / "configs" / "deploy" / "monitoring"
ROLES = ("broker", "learner", "actors")
OF_CARDS = {"nyala_learner_mfu_ratio", "nyala_gpu_utilization_ratio"}
OF_TROUBLE = {"nyala_learner_alerts_total", "nyala_broker_refusals_total"}  # there may be none
WITHOUT_ANSWER = {*OF_CARDS, *OF_TROUBLE}
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt-get install prometheus"),
]


class Prometheus:
    """A server that scrapes a run's folder every second."""

    def __init__(self, folder: Path, run: Path) -> None:
        self._base = f"http://127.0.0.1:{free_port()}"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(DEPLOY / "rules.yml")],
            "scrape_configs": [
                {
                    "job_name": "nyala",
                    "file_sd_configs": [
                        {"files": [f"{run}/metrics/*.json"], "refresh_interval": "1s"}
                    ],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    "--config.file=prometheus.yml",
                    "--storage.tsdb.path=tsdb",
                    f"--web.listen-address={self._base.removeprefix('http://')}",
                ],
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Ask for the newest values; nothing while the server starts."""
        words = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"{self._base}/api/v1/query?{words}", timeout=30) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except OSError:
            return []

    def up(self) -> dict[str, int]:
        """Count the processes that answer, by role."""
        found = self.query("sum by (role) (up)")
        return {each["metric"]["role"]: int(each["value"][1]) for each in found}

    def firing(self) -> set[str]:
        """Name the alerts that fire."""
        return {
            each["metric"]["alertname"] for each in self.query('ALERTS{alertstate="firing"} == 1')
        }

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@contextmanager
def prometheus(folder: Path, run: Path) -> Iterator[Prometheus]:
    server = Prometheus(folder, run)
    try:
        yield server
    finally:
        server.close()


def queries() -> list[str]:
    panels = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    return [
        target["expr"].replace("$run", ".*")
        for panel in panels
        for target in panel.get("targets", [])
    ]


def stop_one_with_work(run: LiveRun) -> int:
    """Stop actor-0 while it has tasks, which then go to others; returns its process id."""
    pid = run.actor_processes()["actor-0"]

    def is_stopped_with_work() -> bool:
        os.kill(pid, signal.SIGSTOP)
        if run.held("actor-0"):
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    run.wait_until(is_stopped_with_work, "actor-0 is stopped while it has tasks")
    return pid


def test_prometheus_sees_all_roles_of_a_run_and_each_query_has_an_answer(tmp_path: Path) -> None:
    run = LiveRun(
        tmp_path,
        "demo.yaml",
        *TORCH,
        "actors.count=3",
        "run.steps=100000",
        "run.eval_every=5",
        "learner.checkpoint_every=5",
        "learner.warm_start_steps=20",
        "learner.broadcast=true",
        "actors.pull_from=[publisher]",
        *(
            f"{role}.metrics_endpoint=http://127.0.0.1:0"
            for role in ("broker", "learner", "actors")
        ),
    )
    with run.up(), prometheus(tmp_path, run.folder) as server:
        run.wait_until(
            lambda: server.up() == {"broker": 1, "learner": 1, "actor": 3}, "all roles are scraped"
        )
        run.wait_until(lambda: run.step >= 10, "ten batches")
        hung = stop_one_with_work(run)
        run.wait_until(
            lambda: bool(server.query("nyala_broker_recovery_seconds_count > 0")), "a recovery"
        )
        os.kill(hung, signal.SIGCONT)
        unanswered = {each for each in queries() if any(name in each for name in WITHOUT_ANSWER)}
        missing = set(queries()) - unanswered

        def are_answered() -> bool:
            missing.difference_update({query for query in missing if server.query(query)})
            return not missing

        wait_until(are_answered, lambda: f"no answer: {missing}", timeout_s=300, every_s=1)
        assert len(unanswered) == len(WITHOUT_ANSWER)
        assert server.query("nyala_ready") != []
        assert not server.firing() & {"NyalaRoleDown", "NyalaNoActor", "NyalaNotFinite"}

        os.kill(run.pids("broker")[0], signal.SIGSTOP)  # hangs: its page, too
        try:
            run.wait_until(lambda: server.up().get("broker") == 0, "the broker is missed")
            run.wait_until(lambda: "NyalaRoleDown" in server.firing(), "an alert of it")
        finally:
            os.kill(run.pids("broker")[0], signal.SIGCONT)
        run.wait_until(lambda: "NyalaRoleDown" not in server.firing(), "the alert ends")
