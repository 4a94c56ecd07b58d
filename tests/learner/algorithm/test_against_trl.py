"""Our losses against TRL's, an independent implementation, on the same log-probs.

`trl` is not among the packages of the project: it brings datasets, pandas and pyarrow along, which
nothing else here needs. `./run test` runs these tests with it, in a step of their own.

TRL's loss is a method of its trainer. It is called on a stand-in that has what the method reads and
hands out the log-probs of this test in the place of a model's: the lines under test are TRL's own.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from configs.settings import AlgorithmSettings
from learner.algorithm.aggregations import AGGREGATIONS, MinibatchSize
from learner.algorithm.losses import policy_loss
from tests.learner.support.made_tokens import make_prepared

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed"),
    pytest.mark.filterwarnings("ignore"),  # TRL's own, and those of what it imports
]

CLOSE = 1e-6
PAGE = Path(__file__).parents[3] / "docs" / "coming-from.md"
LENGTHS = [5, 2, 7, 1]
MAX_COMPLETION_TOKENS = 9
CLIP = {"surrogate": "clip", "clip_low": 0.2, "clip_high": 0.28}
MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
"""Which tokens there are. Shape [B, T]."""


class Case:
    """Log-probs of three policies and advantages, the same for both sides."""

    def __init__(self, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        self.log_mu_BT = -1 - draw(*MASK.shape).abs()
        self.log_prox_BT = self.log_mu_BT + 0.4 * draw(*MASK.shape)
        self.log_pi_BT = self.log_prox_BT + 0.4 * draw(*MASK.shape)
        self.advantages_B = draw(len(LENGTHS))


def of_trl(case: Case, log_anchor_BT: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Ask TRL for the loss, and its gradient by log pi. Shapes [], [B, T]."""
    from trl import GRPOTrainer  # type: ignore[import-not-found]

    log_pi_BT = case.log_pi_BT.clone().requires_grad_()
    everything = torch.ones_like(MASK, dtype=torch.int64)
    defaults = {
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "use_vllm": False,
    }
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_pi_BT, log_pi_BT.detach(), None),
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(delta=options.pop("delta", None), steps_per_generation=1),
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_COMPLETION_TOKENS,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        vllm_importance_sampling_correction=True,
        **defaults | options,
    )
    inputs = {
        "prompt_ids": everything,
        "prompt_mask": everything,
        "completion_ids": everything,
        "completion_mask": MASK.double(),
        "advantages": case.advantages_B,
        "old_per_token_logps": log_anchor_BT,
        "num_items_in_batch": MASK.sum(),
        # As `_generate_and_score_completions` makes it with token_truncate, at most 2.
        "importance_sampling_ratio": (case.log_prox_BT - case.log_mu_BT).exp().clamp(max=2.0),
    }
    loss = GRPOTrainer._compute_loss(stand_in, None, inputs)
    (gradient_BT,) = torch.autograd.grad(loss, log_pi_BT)
    return loss, gradient_BT


def of_ours(case: Case, **choices: object) -> tuple[Tensor, Tensor]:
    """Ask Nyala for the same. Shapes [], [B, T]."""
    settings = AlgorithmSettings.model_validate(choices)
    counts = MinibatchSize(sum(LENGTHS), len(LENGTHS), MAX_COMPLETION_TOKENS)
    # The weights are stored as float32: as float64 from the same counts, rounding stays below 1e-6.
    weights_B = AGGREGATIONS[settings.aggregation](torch.tensor(LENGTHS).numpy(), counts)
    lengths = torch.tensor(LENGTHS)
    log_pi_BT = case.log_pi_BT.clone().requires_grad_()
    prepared = make_prepared(
        case.log_mu_BT[MASK],
        case.advantages_B.repeat_interleave(lengths),
        torch.from_numpy(weights_B).double().repeat_interleave(lengths),
        lengths=LENGTHS,
        log_prox_N=case.log_prox_BT[MASK],
    )
    log_pi_N = log_pi_BT[MASK]
    loss = policy_loss(log_pi_N, torch.zeros_like(log_pi_N), prepared, settings).loss
    (gradient_BT,) = torch.autograd.grad(loss, log_pi_BT)
    return loss, gradient_BT


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("loss_type", "aggregation"),
    [("grpo", "sequence"), ("bnpo", "token"), ("dapo", "token"), ("dr_grpo", "dr_grpo")],
)
def test_clipped_losses_and_their_averages_are_trls(loss_type, aggregation, seed):
    case = Case(seed)

    theirs = of_trl(case, case.log_mu_BT, loss_type=loss_type)
    ours = of_ours(case, correction="none", aggregation=aggregation, **CLIP)

    agree(ours, theirs)


def test_gspo_is_trls_sequence_level_importance_sampling():
    case = Case()

    theirs = of_trl(case, case.log_mu_BT, loss_type="grpo", importance_sampling_level="sequence")
    ours = of_ours(
        case,
        correction="none",
        surrogate="gspo",
        clip_low=0.2,
        clip_high=0.28,
        aggregation="sequence",
    )

    agree(ours, theirs)


def test_decoupled_clip_with_truncated_weights_is_trls_correction_of_vllm():
    case = Case()

    theirs = of_trl(case, case.log_prox_BT, loss_type="dapo", use_vllm=True)
    ours = of_ours(
        case, correction="tis", rho_bar=2.0, proximal="recomputed", aggregation="token", **CLIP
    )

    agree(ours, theirs)


def test_cispo_has_trls_gradient():
    """TRL bounds the ratio at an absolute value, and multiplies with log pi itself: same slope."""
    case = Case()

    _, theirs_BT = of_trl(case, case.log_mu_BT, loss_type="cispo", epsilon_high=1.28)
    _, ours_BT = of_ours(
        case,
        correction="none",
        surrogate="cispo",
        clip_low=1.0,
        clip_high=0.28,
        aggregation="token",
    )

    assert torch.allclose(ours_BT, theirs_BT, atol=CLOSE, rtol=0)


def agree(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=CLOSE, rtol=0)
    assert theirs[1].abs().max() > 100 * CLOSE


def test_names_in_the_page_for_those_who_come_from_trl_are_its_own() -> None:
    from trl import GRPOConfig, GRPOTrainer, ModelConfig

    known = {field.name for config in (GRPOConfig, ModelConfig) for field in fields(config)}
    known |= set(inspect.signature(GRPOTrainer).parameters)
    known.add("teacher_model_name_or_path")  # of GKDConfig, among its experiments
    page, _, _ = PAGE.read_text().partition("## Hosted services")
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    names = {line.split("|")[2].strip(" `") for line in lines} - {"-"}

    assert len(names) > 20
    assert names <= known
