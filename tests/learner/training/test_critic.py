"""The critic: its values, its training, and the parameters that it must not change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from buffer.record.episode import Episode
from configs.errors import CheckpointError
from configs.settings import AlgorithmSettings, CriticSettings, LearnerSettings
from learner.algorithm.microbatch import (
    PreparedMicrobatch,
    Sequences,
    by_place,
    empty_microbatch,
)
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.resume import roll_back
from learner.data.batch import pack, plan_batch
from learner.model.ranks import Ranks
from learner.reporting.metrics import Totals
from learner.training.critic import make_critic, value_loss
from learner.training.preparation import prepare
from tests.learner.support.made_branches import random_branched_episodes
from tests.learner.support.made_critic import (
    APART,
    HEAD,
    MODEL,
    SHARED,
    VTRACE,
    Pair,
    made_microbatches,
    make_pair,
    train_pair,
)
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.padded import StayWide
from tests.learner.support.tiny_policy import tiny_policy

STATE = LearnerState(
    run="tiny", settings_hash="h", step=1, lineage=1, cursor=0, trained=(), totals=Totals()
)
KINDS = pytest.mark.parametrize(
    "settings", [HEAD, SHARED, MODEL, APART], ids=["head", "shared", "model", "apart"]
)


def _policy_parameters(pair: Pair) -> list[torch.Tensor]:
    return [p.detach().clone() for p in pair.policy.parameters()]


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_value_loss_is_the_larger_of_two_squares(clip: float | None) -> None:
    random = torch.Generator().manual_seed(0)
    values, old, targets, weights = torch.rand(4, 9, generator=random, dtype=torch.float64)

    found = value_loss(values, old, targets, weights, clip=clip)

    expected = 0.0
    for value, before, target, weight in zip(
        values.tolist(), old.tolist(), targets.tolist(), weights.tolist(), strict=True
    ):
        square = (value - target) ** 2
        if clip is not None:
            moved = min(max(value, before - clip), before + clip)
            square = max(square, (moved - target) ** 2)
        expected += weight * square / 2
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_a_value_that_moved_far_enough_has_no_gradient_left() -> None:
    values = torch.tensor([0.5, 0.1, -0.5], requires_grad=True)  # beyond, within, the wrong way
    zeros, ones = torch.zeros(3), torch.ones(3)

    value_loss(values, zeros, ones, ones, clip=0.2).backward()

    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -0.9, -1.5])


def test_a_run_without_a_critic_makes_none(ranks: Ranks) -> None:
    policy = tiny_policy(ranks.mesh)

    critic = make_critic(
        policy,
        CriticSettings(),
        LearnerSettings(),
        model_path="nowhere",
        ranks=ranks,
        dtype=torch.float32,
    )

    assert critic is None


@KINDS
def test_a_new_critic_knows_nothing(settings: CriticSettings, tmp_path: Path, ranks: Ranks) -> None:
    trained = train_pair(make_pair(settings, tmp_path, ranks), 1, ranks)

    assert trained.critic is not None
    assert trained.critic.value_mean == 0.0
    assert trained.critic.explained_variance == pytest.approx(0.0, abs=1e-6)
    assert trained.critic.value_loss > 0


@pytest.mark.slow
@KINDS
def test_a_critic_learns_the_values_of_a_batch_that_it_sees_again_and_again(
    settings: CriticSettings, tmp_path: Path, ranks: Ranks
) -> None:
    held = settings.model_copy(update={"warmup_batches": 100})
    pair = make_pair(held, tmp_path, ranks)

    figures = [train_pair(pair, step, ranks, seed=0).critic for step in range(1, 41)]

    assert figures[0] is not None
    assert figures[-1] is not None
    assert figures[-1].value_loss < 0.5 * figures[0].value_loss
    assert figures[-1].explained_variance > 0.3


@KINDS
def test_the_cut_into_microbatches_changes_neither_policy_nor_critic(
    settings: CriticSettings, tmp_path: Path, ranks: Ranks
) -> None:
    whole, cut = (make_pair(settings, tmp_path, ranks) for _ in range(2))

    for step in (1, 2):
        ours = train_pair(cut, step, ranks, microbatch_tokens=20)
        expected = train_pair(whole, step, ranks)
        assert ours.loss == pytest.approx(expected.loss, abs=1e-6)
        assert ours.critic is not None
        assert expected.critic is not None
        assert ours.critic.value_loss == pytest.approx(expected.critic.value_loss, rel=1e-5)
        assert ours.critic.explained_variance == pytest.approx(
            expected.critic.explained_variance, abs=1e-5
        )

    # Sums of gradients; parameters would show what Adam makes of the rounding of zeros.
    for a, b in zip(cut.moments(), whole.moments(), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-6)


def _exact_gradients(
    budgets: tuple[int, int | None], episodes: list[Episode], folder: Path, ranks: Ranks
) -> tuple[list[list[torch.Tensor]], list[int]]:
    """Train a batch in float64; gradients at each optimizer step, and tokens of critic passes."""
    settings = MODEL.model_copy(update={"microbatch_tokens": budgets[1], "clip": 0.1})
    pair = make_pair(settings, folder, ranks)
    torch.nn.init.constant_(pair.critic.model.head.weight, 0.3)
    modules = [pair.policy.double(), pair.critic.model.double()]
    gradients: list[list[torch.Tensor]] = []
    passes: list[int] = []

    def note_gradients() -> None:
        given = (p.grad for module in modules for p in module.parameters())
        gradients.append([gradient.clone() for gradient in given if gradient is not None])

    def note_pass(_: torch.nn.Module, inputs: tuple[Sequences, ...]) -> None:
        if torch.is_grad_enabled():
            passes.append(sum(inputs[0].lengths))

    pair.critic.model.register_forward_pre_hook(note_pass)
    settings_ = VTRACE.model_copy(update={"num_minibatches": 2})
    with StayWide():
        train_pair(
            pair,
            1,
            ranks,
            settings=settings_,
            microbatch_tokens=budgets[0],
            episodes=episodes,
            before_step=note_gradients,
        )
    return gradients, passes


@pytest.mark.parametrize("tokens", [20, 1000], ids=["smaller", "larger"])
@pytest.mark.parametrize(
    "episodes",
    [random_group_episodes(6, 3), random_branched_episodes(12, vocabulary=20)],
    ids=["shared prompts", "branches"],
)
def test_a_token_budget_of_the_critic_changes_no_gradient(
    episodes: list[Episode], tokens: int, tmp_path: Path, ranks: Ranks
) -> None:
    whole, whole_passes = _exact_gradients((1000, None), episodes, tmp_path, ranks)

    cut, passes = _exact_gradients((40, tokens), episodes, tmp_path, ranks)

    assert len(whole_passes) == 2
    assert (len(passes) == 2) if tokens == 1000 else len(passes) > 6
    assert len(whole) == len(cut) == 2
    for ours, expected in zip(cut[0], whole[0], strict=True):
        assert float(expected.abs().max()) > 0
        assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-12)


def test_an_episode_stays_on_its_rank_in_the_critics_packing() -> None:
    episodes = random_group_episodes(10, 3)

    plan = plan_batch(
        1,
        episodes,
        ranks=2,
        settings=VTRACE,
        max_completion_tokens=8,
        microbatch_tokens=24,
        critic_tokens=40,
    )

    shares = [
        [
            pack(
                plan,
                [e for e in episodes if e.task_id in plan.task_ids_of(rank)],
                settings=VTRACE,
                lineages={1: 0},
                lineage=1,
                of_critic=of_critic,
            )
            for of_critic in (False, True)
        ]
        for rank in (0, 1)
    ]
    for of_policy, of_critic in shares:
        assert 1 < len(of_critic) < len(of_policy)
        assert all(sum(m.sequences.lengths) <= 40 for m in of_critic)
        for name in ("behaviour_logprobs_N", "weights_N", "lags_N"):
            ours, theirs = (
                by_place(share, [getattr(m, name) for m in share])
                for share in (of_policy, of_critic)
            )
            assert torch.equal(ours, theirs)
    assert len(shares[0][1]) == len(shares[1][1])


def test_only_a_shared_trunk_is_trained_by_the_value_loss(tmp_path: Path, ranks: Ranks) -> None:
    pairs = {kind: make_pair(kind, tmp_path, ranks) for kind in (HEAD, SHARED, MODEL)}
    # One step for the head's zero weights to become something that a gradient passes through.
    for pair in pairs.values():
        train_pair(pair, 1, ranks)
    norms = {}
    for kind, pair in pairs.items():
        microbatch = made_microbatches(random_group_episodes(4, 3), 2, ranks)[0]
        scores = pair.policy(microbatch.sequences, microbatch.indices_N)
        zeros_N = torch.zeros_like(microbatch.weights_N)
        prepared = PreparedMicrobatch(microbatch, values_N=zeros_N, targets_N=zeros_N + 1)
        loss = pair.critic.loss(prepared, scores.states_MD)

        (loss + 0 * scores.logprobs_N.sum()).backward()

        norms[kind.kind, kind.trunk_gradient] = max(
            float(p.grad.abs().max()) for p in pair.policy.parameters() if p.grad is not None
        )
    assert norms["head", True] > 0
    assert norms["head", False] == norms["model", False] == 0


@KINDS
def test_a_warm_up_trains_the_critic_alone(
    settings: CriticSettings, tmp_path: Path, ranks: Ranks
) -> None:
    pair = make_pair(settings.model_copy(update={"warmup_batches": 2}), tmp_path, ranks)
    before = _policy_parameters(pair)

    held = [train_pair(pair, step, ranks) for step in (1, 2)]
    during = _policy_parameters(pair)
    train_pair(pair, 3, ranks)

    assert all(torch.equal(a, b) for a, b in zip(during, before, strict=True))
    assert [batch.outcome.learning_rate for batch in held] == [0.0, 0.0]
    assert held[1].critic is not None
    assert held[1].critic.value_mean != 0
    assert not all(torch.equal(a, b) for a, b in zip(_policy_parameters(pair), before, strict=True))


def test_all_steps_of_a_batch_train_towards_the_targets_of_its_beginning(
    tmp_path: Path, ranks: Ranks
) -> None:
    ppo = AlgorithmSettings(advantage="gae", correction="none", surrogate="clip")
    found = []
    for num_epochs in (1, 20):
        pair = make_pair(HEAD.model_copy(update={"clip": 0.5}), tmp_path, ranks)
        settings = ppo.model_copy(update={"num_epochs": num_epochs})
        figures = train_pair(pair, 1, ranks, settings=settings).critic
        assert figures is not None
        found.append(figures)

    # Their own figures tell of the beginning, which was the same.
    assert found[1].explained_variance == pytest.approx(found[0].explained_variance, abs=1e-9)
    assert found[1].value_mean == found[0].value_mean == 0.0
    assert found[1].value_loss < 0.8 * found[0].value_loss


def test_padding_between_ranks_needs_no_tokens(tmp_path: Path, ranks: Ranks) -> None:
    pair = make_pair(HEAD, tmp_path, ranks)

    prepared = prepare(
        pair.policy, [empty_microbatch()], settings=VTRACE, ranks=ranks, critic=pair.critic
    )

    assert prepared[0].targets_N is not None
    assert len(prepared[0].targets_N) == 0


def test_whitening_spans_the_microbatches_of_a_batch(tmp_path: Path, ranks: Ranks) -> None:
    pair = make_pair(HEAD, tmp_path, ranks)
    settings = AlgorithmSettings(advantage="gae", whiten="batch")
    microbatches = made_microbatches(random_group_episodes(4, 3), 1, ranks, microbatch_tokens=20)

    prepared = prepare(
        pair.policy, microbatches, settings=settings, ranks=ranks, critic=pair.critic
    )

    assert len(prepared) > 2
    advantages = torch.cat([each.microbatch.advantages_N for each in prepared])
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-5)
    assert float(advantages.std(correction=0)) == pytest.approx(1, abs=1e-2)


@KINDS
def test_a_resumed_critic_equals_the_uninterrupted_one_bit_for_bit(
    settings: CriticSettings, tmp_path: Path, ranks: Ranks
) -> None:
    pair = make_pair(settings, tmp_path, ranks)
    train_pair(pair, 1, ranks)
    checkpoints = Checkpoints(tmp_path / "kept", keep=1, ranks=ranks, critic=pair.critic)
    path = checkpoints.save(STATE, pair.policy, pair.optimizer)
    train_pair(pair, 2, ranks)

    resumed = make_pair(settings, tmp_path, ranks, seed=7)
    Checkpoints(tmp_path / "kept", keep=1, ranks=ranks, critic=resumed.critic).load(
        path, resumed.policy, resumed.optimizer
    )
    train_pair(resumed, 2, ranks)

    critic = resumed.critic.optimizer
    assert all(critic.moments_of(parameter) for parameter in critic.parameters)
    for ours, expected in zip(
        [*resumed.parameters(), *resumed.moments()],
        [*pair.parameters(), *pair.moments()],
        strict=True,
    ):
        assert torch.equal(ours, expected)


@KINDS
def test_a_rollback_without_a_checkpoint_takes_the_critic_to_the_beginning(
    settings: CriticSettings, tmp_path: Path, ranks: Ranks
) -> None:
    pair, fresh = make_pair(settings, tmp_path, ranks), make_pair(settings, tmp_path, ranks)
    for step in (1, 2):
        train_pair(pair, step, ranks)

    restored = roll_back(
        Checkpoints(tmp_path / "kept", keep=1, ranks=ranks, critic=pair.critic),
        pair.policy,
        pair.optimizer,
        model_path=str(tmp_path / "model"),
        before=None,
        critic=pair.critic,
    )

    assert restored == 0 and not pair.moments()
    for one in (pair, fresh):
        train_pair(one, 3, ranks)
    for ours, expected in zip(pair.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("saved", [None, HEAD])
def test_a_checkpoint_without_the_critic_asked_for_is_refused(
    saved: CriticSettings | None, tmp_path: Path, ranks: Ranks
) -> None:
    pair = make_pair(saved or HEAD, tmp_path, ranks)
    own = pair.critic if saved else None
    folder = tmp_path / "kept"
    path = Checkpoints(folder, keep=1, ranks=ranks, critic=own).save(
        STATE, pair.policy, pair.optimizer
    )

    resumed = make_pair(MODEL, tmp_path, ranks)
    with pytest.raises(CheckpointError, match=r"must hold a critic of critic\.kind = model, got"):
        Checkpoints(folder, keep=1, ranks=ranks, critic=resumed.critic).load(
            path, resumed.policy, resumed.optimizer
        )


def test_nothing_of_the_critic_is_published_or_saved(tmp_path: Path, ranks: Ranks) -> None:
    plain = {name for name, _ in tiny_policy(ranks.mesh).causal_lm.named_parameters()}

    for settings in (HEAD, MODEL):
        pair = make_pair(settings, tmp_path, ranks)

        train_pair(pair, 1, ranks)

        # What `publish` and `save_model` are handed is `policy.causal_lm`.
        assert {name for name, _ in pair.policy.causal_lm.named_parameters()} == plain
        assert {id(p) for p in pair.critic.model.parameters()}.isdisjoint(
            id(p) for p in pair.policy.parameters()
        )
