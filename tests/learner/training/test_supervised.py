"""Supervised steps: packing, held-out loss and adapters, beside single rows of transformers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from buffer.record.demonstrations import Demonstrations
from configs.errors import RecordError
from configs.settings import LearnerSettings
from learner.model.policy import Policy
from learner.model.ranks import Ranks
from learner.supervised import RowOrder, SupervisedTraining
from learner.training.optimizer import ScheduledOptimizer
from tests.learner.support.adapted_policy import adapted_policy
from tests.learner.support.made_demonstrations import loss_row_by_row, write_demonstrations
from tests.learner.support.tiny_policy import constant_rate, tiny_causal_lm

ROWS = 9
STILL = LearnerSettings(max_grad_norm=1e9)


def training_of(
    rows: Demonstrations, *, tokens: int, batch: int = ROWS, total: int = ROWS
) -> SupervisedTraining:
    """Training of a wide tiny model whose gradients are kept: its optimizer takes no step."""
    policy = Policy(tiny_causal_lm().double(), temperature=0.5)
    return SupervisedTraining(
        policy,
        ScheduledOptimizer(policy, constant_rate(1e-3), STILL),
        rows,
        RowOrder(num_rows=rows.num_trained, batch=batch, total=total, seed=0),
        lambda _step: tokens,
    )


@pytest.mark.parametrize("tokens", [1, 20, 1000])
def test_packed_rows_have_the_loss_and_gradient_of_single_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    rows = write_demonstrations(tmp_path, ROWS)
    alone = tiny_causal_lm().double()
    expected = loss_row_by_row(alone, rows, list(range(ROWS)))
    expected.backward()
    training = training_of(rows, tokens=tokens)
    kept: list[torch.Tensor] = []
    step = ScheduledOptimizer.step

    def keep(optimizer: ScheduledOptimizer, *arguments: int, loss: float) -> object:
        gradients = [parameter.grad for parameter in optimizer.parameters]
        kept.extend(gradient.clone() for gradient in gradients if gradient is not None)
        return step(optimizer, *arguments, loss=loss)

    monkeypatch.setattr(ScheduledOptimizer, "step", keep)

    (figures,) = training.train()

    assert figures.loss == pytest.approx(float(expected.detach()), abs=1e-10)
    assert figures.trained_tokens == int(rows.is_trained_T.sum())
    for ours, theirs in zip(kept, alone.parameters(), strict=True):
        assert theirs.grad is not None
        assert torch.allclose(ours, theirs.grad, atol=1e-10)


def test_the_held_out_loss_is_that_of_the_last_rows_and_changes_nothing(tmp_path: Path) -> None:
    rows = write_demonstrations(tmp_path, 4, held_out=5)
    expected = loss_row_by_row(tiny_causal_lm().double(), rows, [4, 5, 6, 7, 8])
    training = training_of(rows, tokens=20)

    assert training.held_out_loss(0) == pytest.approx(float(expected.detach()), abs=1e-10)
    assert all(parameter.grad is None for parameter in training.policy.parameters())
    assert training_of(write_demonstrations(tmp_path, 4), tokens=20).held_out_loss(0) is None


def test_steps_lower_the_loss(tmp_path: Path) -> None:
    rows = write_demonstrations(tmp_path, ROWS)
    training = training_of(rows, tokens=1000, batch=4, total=40 * ROWS)
    training.optimizer.schedule = constant_rate(1e-2)

    losses = [figures.loss for figures in training.train()]

    assert len(losses) == 90
    assert losses[-1] < 0.5 * losses[0]


def test_each_row_is_trained_once_in_a_pass_and_passes_have_other_orders() -> None:
    order = RowOrder(num_rows=7, batch=3, total=21, seed=5)

    rows = [row for step in range(1, order.steps + 1) for row in order.rows_of(step)]

    passes = [rows[begin : begin + 7] for begin in (0, 7, 14)]
    assert [Counter(rows_of_pass) for rows_of_pass in passes] == [Counter(range(7))] * 3
    assert len({tuple(rows_of_pass) for rows_of_pass in passes}) == 3
    assert RowOrder(num_rows=7, batch=3, total=21, seed=6).rows_of(1) != order.rows_of(1)
    assert [len(RowOrder(7, 3, 10, 0).rows_of(step)) for step in (1, 2, 3, 4)] == [3, 3, 3, 1]


def test_only_adapters_learn_where_there_are_some(tmp_path: Path, ranks: Ranks) -> None:
    rows = write_demonstrations(tmp_path, ROWS)
    policy, optimizer = adapted_policy(ranks)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    order = RowOrder(num_rows=ROWS, batch=4, total=20 * ROWS, seed=0)
    optimizer.schedule = constant_rate(3e-2)

    training = SupervisedTraining(policy, optimizer, rows, order, lambda _step: 30, ranks)
    losses = [figures.loss for figures in training.train()]

    assert losses[-1] < losses[0] - 0.2
    moved = {n for n, p in policy.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert moved == {name for name in before if "lora_" in name}


def test_a_folder_without_demonstrations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="must hold demonstrations in tokens, got none"):
        Demonstrations.read(tmp_path)
