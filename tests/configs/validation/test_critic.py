"""Choices of critic and algorithm that make no method are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from configs.settings import Settings

VTRACE = {"advantage": "vtrace", "correction": "none", "proximal": "recomputed"}


def _settings(
    algorithm: dict[str, Any] | None = None, critic: dict[str, Any] | None = None
) -> Settings:
    return Settings.model_validate(
        {
            "run": {"model": "init", "steps": 10},
            "algorithm": algorithm or VTRACE,
            "critic": {"kind": "head", **(critic or {})},
        }
    )


@pytest.mark.parametrize(
    "algorithm",
    [
        VTRACE,
        {**VTRACE, "surrogate": "reinforce"},
        {"advantage": "gae", "whiten": "batch"},
        {"advantage": "gae", "correction": "tis", "proximal": "recomputed", "num_epochs": 4},
    ],
)
def test_a_critic_goes_with_gae_and_v_trace(algorithm: dict[str, Any]) -> None:
    assert _settings(algorithm).critic.kind == "head"


@pytest.mark.parametrize(
    ("algorithm", "critic", "answer"),
    [
        (VTRACE, {"kind": "none"}, "critic.kind must be head or model with .* = vtrace, got none"),
        ({"advantage": "grpo"}, {}, "critic.kind must be none with .* = grpo, got head; nothing"),
        (
            {**VTRACE, "proximal": "behaviour"},
            {},
            "algorithm.proximal must be recomputed with .*, got behaviour; .* would count twice",
        ),
        (
            {**VTRACE, "correction": "tis"},
            {},
            "algorithm.correction must be none with .*, got tis; .* weighed with it twice",
        ),
        (
            {**VTRACE, "whiten": "batch"},
            {},
            "algorithm.whiten must be none with .*, got batch; .* one of minus the mean",
        ),
        (
            {"advantage": "gae", "whiten": "group"},
            {},
            "algorithm.whiten must be none or batch with .* = gae, got group; the critic",
        ),
        (VTRACE, {"c_bar": 1.5}, r"critic.c_bar must be <= critic.rho_bar = 1.0, got 1.5"),
        (
            VTRACE,
            {"kind": "model", "trunk_gradient": True},
            "critic.trunk_gradient must be false with critic.kind = model, got true",
        ),
        (
            VTRACE,
            {"microbatch_tokens": 64},
            "critic.microbatch_tokens must be null with critic.kind = head, got 64; only a model",
        ),
        (VTRACE, {"offload": ["parameters"]}, "critic.offload must be null with .* = head"),
        (
            VTRACE,
            {"warmup_batches": 10},
            "critic.warmup_batches must be < run.steps = 10, got 10; the policy would never",
        ),
    ],
)
def test_what_makes_no_method_is_refused(
    algorithm: dict[str, Any], critic: dict[str, Any], answer: str
) -> None:
    with pytest.raises(ValidationError, match=answer):
        _settings(algorithm, critic)


@pytest.mark.parametrize(
    ("offload", "learner", "answer"),
    [
        (
            "parameters",
            {"optimizer": "muon"},
            "critic.offload must not have parameters with .*muon",
        ),
        (
            "activations",
            {"activation_checkpointing": "none"},
            "activation_checkpointing must be full where critic.offload has activations, got none",
        ),
    ],
)
def test_an_offload_of_the_critic_alone_has_the_bounds_of_the_learners(
    offload: str, learner: dict[str, Any], answer: str
) -> None:
    tables = {
        "run": {"model": "init", "steps": 10},
        "algorithm": VTRACE,
        "critic": {"kind": "model", "offload": [offload]},
    }

    assert Settings.model_validate(tables).critic.offload == (offload,)
    with pytest.raises(ValidationError, match=answer):
        Settings.model_validate({**tables, "learner": learner})
