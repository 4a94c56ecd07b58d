"""Figures of `metrics.jsonl` and the learner's page: in the table is what a real run writes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from buffer.record.episode import PolicyVersion
from configs.errors import SettingsError
from configs.metrics import CARD_METRICS, Histogram
from console.verbs.reference_lists import metrics_as_lines, metrics_as_markdown
from learner.model.ranks import Ranks
from learner.reporting.figures import FIGURES
from learner.reporting.metrics import BatchFigures, StepTimes
from learner.reporting.metrics_page import METRICS, LearnerPage
from learner.training.critic import CriticFigures
from learner.training.divergence import Divergence
from learner.training.step import BatchOutcome, TrainedBatch
from learner.weights.log import VersionDelivery
from tests.learner.support.ring_in_process import RingInProcess
from tests.learner.support.tiny_run import tiny_settings

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
OF_CRITIC = {field.name for field in fields(CriticFigures)}
OF_SAMPLER = {f"prompts_{kind}" for kind in ("unseen", "hard", "medium", "easy", "solved")}
CLASSES = (BatchFigures, Divergence, BatchOutcome, TrainedBatch, CriticFigures, StepTimes)
NESTED = {"outcome", "divergence", "critic", "measured"}
"""Fields whose own fields are figures."""
KEYS = {figure.key for figure in FIGURES}
ELSEWHERE = OF_CRITIC | OF_SAMPLER | {key for key in KEYS if key.startswith("sft_")}
"""Keys of runs with a critic, with a sampler, and on demonstrations."""


@pytest.mark.slow
def test_a_real_run_writes_what_is_in_the_table_and_shows_it(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = tiny_settings(tmp_path, run={"steps": 2, "eval_every": 2, "eval_episodes": 2})
    ring = RingInProcess(settings, redis_url, ranks)

    assert ring.live()

    lines = [
        json.loads(text)
        for text in (settings.run.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert {key for line in lines for key in line} == KEYS - ELSEWHERE
    values = ring.page.values()
    of_cards = {metric.name for metric in CARD_METRICS}
    assert set(values) - of_cards == {metric.name for metric in METRICS} - of_cards
    trained = sum(line["trained_tokens"] for line in lines)
    assert values["nyala_learner_trained_tokens_total"] == trained
    assert values["nyala_learner_batches_total"] == 2
    assert values["nyala_learner_kl_nats"] == lines[-1]["kl_pi_mu_k3"]
    for metric in ("score", "reward"):
        assert len(dict(values[f"nyala_learner_held_out_{metric}"])) == 1  # type: ignore[arg-type]
    assert ring.page.health.not_ready() is None


def test_a_figure_of_training_is_in_the_table() -> None:
    assert {field.name for part in CLASSES for field in fields(part)} - NESTED <= KEYS


def test_every_figure_has_a_unit_and_a_meaning_and_is_in_the_table_once() -> None:
    assert [figure for figure in FIGURES if not figure.unit or not figure.meaning] == []
    assert len(KEYS) == len(FIGURES)


def test_the_docs_have_the_tables_that_nyala_metrics_prints() -> None:
    assert metrics_as_markdown().strip() in DOCS.read_text(encoding="utf-8")


def test_only_a_version_that_a_group_confirmed_has_a_time() -> None:
    page = LearnerPage(limit_s=60)

    for members, wall_s in ((2, 0.4), (0, 0.0)):
        page.delivered(
            VersionDelivery(
                PolicyVersion(1, 1),
                actors=2,
                members=members,
                epoch=1,
                is_complete=True,
                wall_s=wall_s,
            )
        )

    values = page.values()
    times = values["nyala_learner_publish_seconds"]
    assert isinstance(times, Histogram)
    assert (values["nyala_learner_published_versions_total"], sum(times.counts)) == (2, 1)
    assert times.total == 0.4


def test_a_learner_is_ready_from_its_first_wait_for_a_batch() -> None:
    page = LearnerPage(limit_s=60)

    assert page.health.not_ready() == "waits for its start"
    assert page.health.not_alive() is None
    page.pulse.beat()
    assert page.health.not_ready() is None


def test_figures_are_found_by_a_part_of_their_name_or_meaning() -> None:
    found = metrics_as_lines("KL_")

    assert found
    assert all("kl_" in line.lower() for line in found.splitlines())
    with pytest.raises(SettingsError, match=r"no figure has 'nonsense'.*lists all"):
        metrics_as_lines("nonsense")
