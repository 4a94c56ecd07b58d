"""One rank of two: trains two batches, checkpoints, trains a third, goes back; reads saved models.

For `test_ranks.py`. Arguments: folder with a `model` and others in `saved`, for the checkpoint and
for the ranks' findings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from configs.settings import AlgorithmSettings, LearnerSettings
from learner.checkpointing.bucket_copies import BucketCopies
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.resume import roll_back
from learner.data.batch import BatchPlan, pack, plan_batch
from learner.model.policy import Policy, freeze, probe_logprobs, rounded_logprobs
from learner.model.ranks import Ranks, join
from learner.reporting.metrics import Totals
from learner.training.optimizer import ScheduledOptimizer
from learner.training.step import TrainedBatch, train_batch
from tests.learner.support.adapted_policy import PACKED, adapted_policy, published_bytes
from tests.learner.support.adapted_policy import SETTINGS as ADAPTERS
from tests.learner.support.made_critic import APART, HEAD, MODEL, make_pair, train_pair
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.random_models import differences_on_meshes
from tests.learner.support.ranks.layouts import arranged
from tests.learner.support.tiny_policy import constant_rate, tiny_policy

SETTINGS = AlgorithmSettings(
    entropy_bonus=0.01, kl_coefficient=0.05, teacher={"even": "one", "odd": "other"}
)
# So few that ranks have different numbers of microbatches.
MICROBATCH_TOKENS = 24
STATE = LearnerState(
    run="tiny", settings_hash="h", step=2, lineage=1, cursor=0, trained=(), totals=Totals()
)
PROBE = (3, 9, 4, 4, 17)


def new_policy(
    ranks: Ranks, *, seed: int = 0, settings: LearnerSettings | None = None
) -> tuple[Policy, ScheduledOptimizer]:
    """Make the policy that every test of ranks trains."""
    policy = tiny_policy(ranks.mesh, seed=seed)
    policy.sequence_group = ranks.sequence
    return policy, ScheduledOptimizer(policy, constant_rate(1e-3), settings or LearnerSettings())


def train(policy: Policy, optimizer: ScheduledOptimizer, step: int, ranks: Ranks) -> TrainedBatch:
    """Train one batch as the loop does: rank 0 plans, every rank packs its share."""
    episodes = random_group_episodes(5, 3, seed=step)
    plan = plan_batch(
        step,
        episodes,
        ranks=ranks.data_size,
        settings=SETTINGS,
        max_completion_tokens=8,
        microbatch_tokens=MICROBATCH_TOKENS,
        environment_of=lambda group_id: "odd" if group_id % 2 else "even",
    )
    plan = BatchPlan.decode(ranks.broadcast(plan.encode() if ranks.is_first else None))
    own = {*plan.task_ids_of(ranks.data_rank)}
    microbatches = pack(
        plan,
        [episode for episode in episodes if episode.task_id in own],
        settings=SETTINGS,
        lineages={1: 0},
        lineage=1,
    )
    reference, *teachers = (freeze(tiny_policy(ranks.mesh, seed=seed)) for seed in (5, 6, 7))
    for frozen in (reference, *teachers):
        frozen.sequence_group = ranks.sequence
    return train_batch(
        policy,
        optimizer,
        step,
        microbatches,
        settings=SETTINGS,
        ranks=ranks,
        reference=reference,
        teachers=teachers,
    )


def whole_parameters(policy: Policy) -> list[torch.Tensor]:
    """Gather all parameters; every rank must call it."""
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in policy.parameters()
    ]


def train_with_muon(ranks: Ranks) -> list[torch.Tensor]:
    """Train two batches with Muon; the parameters."""
    policy, optimizer = new_policy(ranks, settings=LearnerSettings(optimizer="muon"))
    for step in (1, 2):
        train(policy, optimizer, step, ranks)
    return whole_parameters(policy)


def save_with_8_bits(folder: Path, ranks: Ranks) -> list[torch.Tensor]:
    """Train a batch with AdamW in 8 bits, and write a checkpoint; the moments, whole."""
    policy, optimizer = new_policy(ranks, settings=LearnerSettings(optimizer="adamw8bit"))
    train(policy, optimizer, 1, ranks)
    Checkpoints(folder / "8-bits", keep=1, ranks=ranks).save(STATE, policy, optimizer)
    return whole_moments(optimizer)


def train_adapters(
    ranks: Ranks, learner: LearnerSettings = ADAPTERS
) -> tuple[list[torch.Tensor], bytes]:
    """Train adapters for two batches; the parameters, and the wire bytes with them, on rank 0."""
    policy, optimizer = adapted_policy(ranks, settings=learner)
    for step in (1, 2):
        train(policy, optimizer, step, ranks)
    return whole_parameters(policy), published_bytes(policy.causal_lm, is_first=ranks.is_first)


def whole_moments(optimizer: ScheduledOptimizer) -> list[torch.Tensor]:
    """Gather all moments; every rank must call it."""
    kept = [optimizer.moments_of(parameter) for parameter in optimizer.parameters]
    moments = [moment for each in kept for _, moment in sorted(each.items())]
    return [m.full_tensor() if isinstance(m, DTensor) else m for m in moments]


def train_critics(
    folder: Path, ranks: Ranks, *, steps: Sequence[int] = (1, 2)
) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """Train a policy with each kind of critic for some batches; what they showed, and moments."""
    figures, moments = [], []
    for settings in (HEAD, MODEL, APART):
        pair = make_pair(settings, folder, ranks)
        for step in steps:
            trained = train_pair(pair, step, ranks, microbatch_tokens=MICROBATCH_TOKENS)
            assert trained.critic is not None
            figures.append(asdict(trained.critic))
        moments += pair.moments()
    return figures, moments


def go_back(
    checkpoints: Checkpoints,
    policy: Policy,
    optimizer: ScheduledOptimizer,
    model: Path,
    ranks: Ranks,
) -> tuple[list[int], list[list[torch.Tensor]]]:
    """Roll back to the checkpoint, then to before it; where that was, and the parameters there."""
    steps, parameters = [], []
    for before in (None, STATE.step):
        step = roll_back(checkpoints, policy, optimizer, model_path=str(model), before=before)
        steps.append(step)
        parameters.append(whole_parameters(policy))
    assert not any(optimizer.moments_of(parameter) for parameter in optimizer.parameters)
    return steps, parameters


def main(folder: Path) -> None:
    """Train, and let rank 0 write down what it found."""
    ranks = join("cpu", threads=1)
    policy, optimizer = new_policy(ranks)
    batches = [train(policy, optimizer, step, ranks) for step in (1, 2)]
    copies = BucketCopies(f"file://{folder}/bucket", "tiny")
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, ranks=ranks, copies=copies)
    checkpoints.save(STATE, policy, optimizer)
    logprobs = probe_logprobs(policy, PROBE)
    rounded = rounded_logprobs(policy, PROBE, dtype=torch.bfloat16)
    batches.append(train(policy, optimizer, 3, ranks))
    parameters = whole_parameters(policy)
    with_muon = train_with_muon(ranks)
    with_8_bits = save_with_8_bits(folder, ranks)
    values, critic_parameters = train_critics(folder, ranks)
    adapted, packed = [train_adapters(ranks)], train_adapters(ranks, PACKED)
    shared = arranged(ranks, {"sequence": 2})
    adapted.append(train_adapters(shared))
    policy_, optimizer_ = new_policy(shared)
    sharing = [asdict(train(policy_, optimizer_, step, shared)) for step in (1, 2)]
    rounded_apart = rounded_logprobs(policy_, PROBE, dtype=torch.bfloat16)
    sharing_values, _ = train_critics(folder, shared, steps=(1,))
    steps, older = go_back(checkpoints, policy, optimizer, folder / "model", ranks)
    found = {
        "batches": [asdict(batch) for batch in batches],
        "probe": logprobs,
        "rounded": rounded,
        "rounded_apart": rounded_apart,
        "values": values,
        "sharing": sharing,
        "sharing_values": sharing_values,
        "back_to": steps,
        "differences": differences_on_meshes(folder / "saved", ranks),
    }
    (folder / f"found-{ranks.rank}.json").write_text(json.dumps(found))
    if ranks.is_first:
        torch.save(older, folder / "older.pt")
        torch.save(parameters, folder / "parameters.pt")
        torch.save(with_muon, folder / "muon.pt")
        torch.save(with_8_bits, folder / "8-bits.pt")
        torch.save(adapted, folder / "adapted.pt")
        torch.save([packed], folder / "packed.pt")
        torch.save(critic_parameters, folder / "critics.pt")
    ranks.barrier()
    ranks.destroy_process_group()
