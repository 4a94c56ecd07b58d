"""`docs/coming-from.md`: each name of another project is answered with the setting of its row."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from configs.error_text import owner_of
from configs.errors import SettingsError
from configs.loader import load

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


def rows() -> list[list[str]]:
    """The cells of the table: our setting, then TRL's, verl's and prime-rl's."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_names_of_others_lead_to_the_setting_of_their_row(row: list[str]) -> None:
    setting, *others = row
    names = [name for name in others if name != "-"]

    assert names
    for name in names:
        is_the_same = name.rpartition(".")[2] == setting.rpartition(".")[2]
        assert is_the_same or owner_of(name) == setting, name


OF_SERVICES = {
    "actor_count": "did you mean actors.count?",
    "batch_size_per_actor": "did you mean actors.max_concurrent_episodes?",
    "load_balancing_strategy": "the least loaded one gets it",
    "communication_interval": "did you mean learner.publish_every?",
    "checkpoint_interval": "did you mean learner.checkpoint_every?",
    "replay_buffer_size": "did you mean replay.capacity?",
    "timeout_per_step": "did you mean actors.environment_timeout_s?",
    "reward_file": "did you mean run.reward?",
    "prompt_file": "is `path` in run.environment_settings, with run.environment: dataset",
    "retry_options.enable_retry": "is always started again, .* by broker.max_attempts",
    "retry_options.max_retry_times": "set how often a task is tried by broker.max_attempts",
    "policy_sets": "the learner takes smaller microbatches than learner.microbatch_tokens",
}
"""Names of hosted services -> what each is answered with."""


@pytest.mark.parametrize("table", [None, "run", "actors", "trainer"])
def test_a_file_with_every_name_of_a_hosted_service_is_answered_with_ours(
    table: str | None, tmp_path: Path
) -> None:
    values: dict[str, object] = {name: 1 for name in OF_SERVICES if "." not in name}
    values["retry_options"] = {"enable_retry": True, "max_retry_times": 5}
    values["policy_sets"] = [{"condition": "OOM", "action": "reduce_batch_size"}]
    tables: dict[str, object] = {"run": {"model": "init"}}
    if table is None:
        tables |= values
    else:
        tables[table] = {"model": "init", **values} if table == "run" else values
    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps(tables))

    with pytest.raises(SettingsError) as refused:
        load(path)

    lines = str(refused.value).splitlines()[1:]
    assert len(lines) == len(OF_SERVICES)
    prefix = "" if table is None else f"{table}."
    for name, answer in OF_SERVICES.items():
        (line,) = [line for line in lines if line.startswith(f"  $.{prefix}{name} ")]
        assert re.search(answer, line), line
        assert f"`{name.partition('.')[0]}`" in PAGE.read_text(encoding="utf-8")
