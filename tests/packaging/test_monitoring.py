"""Prometheus' rules and the dashboard: each alert fires on its fault alone, and each name exists.

`promtool` (of Debian's package `prometheus`) runs the rules; without it those tests are skipped.
"""

import json
import re
import subprocess

import pytest
import yaml

from configs.metrics import host_and_port
from console.verbs.reference_lists import PAGES
from tests.needs import needs
from tests.packaging.support.compose_file import ROOT, load_compose
from tests.packaging.support.series import FAULTS, HEALTHY, MINUTES

FOLDER = ROOT / "configs" / "deploy" / "monitoring"
RULES = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
EXPRESSIONS = [rule["expr"] for group in RULES for rule in group["rules"]]
ALERTS = {rule["alert"] for group in RULES for rule in group["rules"] if "alert" in rule}
RECORDS = {rule["record"] for group in RULES for rule in group["rules"] if "record" in rule}
OF_PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total"}


def queries_of_dashboard():
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def names_of_series():
    kinds = {"histogram": ("_bucket", "_sum", "_count")}
    return {
        metric.name + end
        for metrics in PAGES.values()
        for metric in metrics
        for end in kinds.get(metric.kind, ("",))
    }


@pytest.mark.parametrize("query", [*EXPRESSIONS, *queries_of_dashboard()])
def test_a_query_names_series_that_roles_or_rules_make(query):
    named = set(re.findall(r"\b(?:nyala|process)[_:][a-z0-9_:]+", query))

    assert named - names_of_series() - RECORDS - OF_PROCESS == set()
    assert named or re.search(r"\bup\{", query)


def test_every_record_is_used():
    used = "\n".join([*EXPRESSIONS, *queries_of_dashboard()])

    assert {name for name in RECORDS if name not in used} == set()


def test_every_alert_has_a_first_step():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")

    assert set(re.findall(r"^\| `(Nyala\w+)` \|", text, re.MULTILINE)) == ALERTS


def test_every_alert_names_the_section_with_its_first_step():
    alerts = [rule for group in RULES for rule in group["rules"] if "alert" in rule]
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", text, re.MULTILINE))
    anchors = {title.lower().replace(" ", "-"): body for title, body in sections.items()}

    for rule in alerts:
        page, _, section = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/operations.md"
        assert f"| `{rule['alert']}` |" in anchors[section]


def test_every_alert_has_a_fault():
    assert set(FAULTS) == ALERTS


@needs("promtool")
@pytest.mark.parametrize("alert", [None, *FAULTS])
def test_an_alert_fires_on_its_fault_and_nothing_on_a_healthy_run(alert, tmp_path):
    series = HEALTHY | (FAULTS[alert] if alert else {})
    fires = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": each} for name, each in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{MINUTES}m",
                "exp_samples": fires,
            }
        ],
    }
    rules = {"rule_files": [str(FOLDER / "rules.yml")], "evaluation_interval": "1m"}
    (tmp_path / "case.yml").write_text(yaml.safe_dump(rules | {"tests": [case]}))

    done = subprocess.run(
        ["promtool", "test", "rules", "case.yml"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@needs("promtool")
def test_promtool_accepts_the_scrape_configuration():
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"],
        cwd=FOLDER,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_asks_each_service_at_the_port_at_which_it_serves():
    services = load_compose()["services"]
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    asked = {
        name: target["port"]
        for job in jobs
        for target in job["dns_sd_configs"]
        for name in target["names"]
    }
    served = {
        name: host_and_port(word.partition("metrics_endpoint=")[2])[1]
        for name, service in services.items()
        for word in service.get("command", [])
        if "metrics_endpoint=" in word
    }

    assert asked == served
    assert len(served) == 5
