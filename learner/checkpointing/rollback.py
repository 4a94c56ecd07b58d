"""Going back to the weights of a checkpoint while batch numbers go on.

The store hears nothing of it: the next version is published under its own number, with older
weights inside. Batches since the checkpoint stay trained, in vain; a life that dies before its next
checkpoint replays them from their sealed claims, and comes to the same rollback.
"""

from __future__ import annotations

from pathlib import Path

import structlog
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from learner.model.policy import Policy, load_causal_lm
from learner.model.ranks import Ranks
from learner.training.critic import Critic
from learner.training.optimizer import AdamWithSchedule

from .checkpoint import Checkpoints

log = structlog.get_logger()


def roll_back(
    checkpoints: Checkpoints,
    policy: Policy,
    optimizer: AdamWithSchedule,
    *,
    ranks: Ranks,
    model_path: str,
    before: int | None,
    critic: Critic | None = None,
) -> int:
    """Load the newest checkpoint into policy, critic and optimizers; every rank must call it.

    Args:
        checkpoints: Of the run.
        policy: Whose weights are replaced.
        optimizer: Whose moments are replaced.
        ranks: Rank 0 chooses for all.
        model_path: The model that the run began with: where to go without a checkpoint.
        before: Only checkpoints of earlier batches than this; None = any.
        critic: Of the run, if it has one; the checkpoints know it too.

    Returns:
        Batches that the weights contain now.

    Raises:
        CheckpointError: None of these checkpoints is intact.
    """
    chosen = b""
    if ranks.is_first and (newest := checkpoints.newest(before=before)) is not None:
        chosen = str(newest[0]).encode()
    path = ranks.broadcast(chosen).decode()
    if path:
        checkpoints.load(Path(path), policy, optimizer)
        return int(path.rpartition("-")[2])
    _begin_anew(policy, optimizer, model_path)
    if critic is not None:
        critic.reset(model_path)
    return 0


def _begin_anew(policy: Policy, optimizer: AdamWithSchedule, model_path: str) -> None:
    """Take the initial weights, and forget all moments."""
    whole = load_causal_lm(model_path).state_dict()
    set_model_state_dict(policy.causal_lm, whole, options=StateDictOptions(full_state_dict=True))
    optimizer.adam.state.clear()
