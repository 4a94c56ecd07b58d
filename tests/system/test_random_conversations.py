"""Random conversations of live agents: a few of each family of chat templates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.actors.support.chat_families import FAMILIES, chat_tokenizer, wheel_templates
from tests.system.random_conversations import (
    check_family,
    check_gradients,
    check_scores,
    sample,
    save_model,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_of_a_family_are_what_was_sampled_and_rendered(
    tmp_path: Path, family: str
) -> None:
    kinds = check_family(chat_tokenizer(tmp_path, FAMILIES[family]), range(6), undisturbed=0.5)

    often = {"continued", "rendered", "kills", "branches"}
    if family == "forgetful":  # drops all thinking, so each turn behind another forks
        often.remove("continued")
    assert min(kinds[kind] for kind in often) > 5
    assert min(kinds["cut"], kinds["compared"]) > 0
    assert bool(kinds["calls of tools"]) is (family not in ("chatml", "gemma", "unclosed"))


def test_templates_of_installed_packages_hold(tmp_path: Path) -> None:
    templates = [t for name, t in wheel_templates() if name.endswith(("chatml", "basic"))]
    if not templates:
        pytest.skip("vLLM is not installed")

    for template in templates:
        assert check_family(chat_tokenizer(tmp_path, template), range(3))["rendered"]


@pytest.mark.slow
def test_the_learner_scores_conversations_as_the_engine_did(tmp_path: Path) -> None:
    tokenizer = save_model(tmp_path)

    episodes = asyncio.run(sample(tmp_path, tokenizer, range(6)))

    assert sum(len(episode.completion.branches) for episode in episodes) > 5
    assert max(check_scores(tmp_path, [episode]) for episode in episodes) < 1e-4
    check_gradients(tmp_path, episodes[:2])
