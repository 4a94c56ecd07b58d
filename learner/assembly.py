"""Start of the learner on one rank: join, load, resume, run.

Wires the components in the order of their dependencies, and logs each stage.
"""

from __future__ import annotations

import threading

import structlog
import torch

from broker.protocol.messages import Publication
from buffer.store import Store
from configs.errors import SettingsError
from configs.secrets import redis_url
from configs.settings import Settings
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.recovery import publish_pointer, recover
from learner.checkpointing.resume import StartState, take_over
from learner.data.ledger import Ledger
from learner.data.retrying_store import RetryingStore
from learner.model.policy import Policy, freeze, load_causal_lm, probe_logprobs, shard
from learner.model.ranks import Ranks, join
from learner.training.critic import Critic, make_critic
from learner.training.optimizer import AdamWithSchedule, Schedule
from learner.weights.publish import WeightPublisher

from .components import Components
from .loop import Loop

log = structlog.get_logger()

PROBE_TOKENS = (
    16  # enough for every layer and head to matter, short enough for the smallest context
)


def run_learner(settings: Settings, stopping: threading.Event) -> bool:
    """Run one life of the learner; True when the run has finished, False when asked to stop.

    Raises:
        SettingsError: A person has to change something first.
        CheckpointError: The checkpoints cannot be trusted, or do not belong to this store.
        LostLineage: Another learner owns the run now.
    """
    log.info("starting", stage="joining the process group")
    ranks = join(settings.learner.device, threads=settings.learner.threads)
    # A Redis that was restarted is not worked with before rank 0 has put it right.
    admits = (lambda *_: False) if ranks.is_first else None
    url = redis_url(settings.run, settings.buffer)
    with Store(url, settings.run.name, admits=admits) as raw_store:
        store = RetryingStore(raw_store)
        log.info("starting", stage="loading the model")
        policy = load_policy(settings, ranks)
        reference = load_reference(settings, ranks, vocabulary=policy.vocabulary)
        optimizer = AdamWithSchedule(policy, schedule(settings), settings.learner)
        critic = load_critic(policy, settings, ranks)
        checkpoints = Checkpoints(
            settings.run.folder / "checkpoints",
            keep=settings.learner.keep_checkpoints,
            ranks=ranks,
            critic=critic,
        )
        log.info("starting", stage="taking the run over")
        start = StartState.decode(
            ranks.broadcast(
                take_over(settings, store, checkpoints).encode() if ranks.is_first else None
            )
        )
        ledger = start.ledger() if ranks.is_first else None
        if ledger is not None:
            recovers_from(store, settings, ledger)
        if start.checkpoint is not None:
            log.info("starting", stage="loading the checkpoint", path=str(start.checkpoint))
            checkpoints.load(start.checkpoint, policy, optimizer)
        log.info("starting", stage="starting the publisher")
        publisher = make_publisher(settings, ranks, store, policy, ledger)
        try:
            log.info("starting", stage="waiting for episodes")
            components = Components(
                settings=settings,
                ranks=ranks,
                store=store,
                policy=policy,
                optimizer=optimizer,
                critic=critic,
                checkpoints=checkpoints,
                publisher=publisher,
                start=start,
                ledger=ledger,
                reference=reference,
            )
            return Loop(components, stopping).run()
        finally:
            publisher.close()
            ranks.leave()


def load_policy(settings: Settings, ranks: Ranks, *, model: str | None = None) -> Policy:
    """Load a policy, by default the initial one, and shard it."""
    path = settings.run.model_path if model is None else model
    policy = Policy(load_causal_lm(path), temperature=settings.run.temperature)
    policy.train()
    return shard(policy, ranks.mesh, dtype=compute_dtype(settings, ranks))


def load_critic(policy: Policy, settings: Settings, ranks: Ranks) -> Critic | None:
    """Make the critic, if the settings ask for one."""
    return make_critic(
        policy,
        settings.critic,
        settings.learner,
        model_path=settings.run.model_path,
        ranks=ranks,
        dtype=compute_dtype(settings, ranks),
    )


def compute_dtype(settings: Settings, ranks: Ranks) -> torch.dtype:
    """Say what forward and backward passes compute in."""
    # On a CPU the backward pass is as fast in float32, and exact.
    is_bfloat16 = settings.run.dtype == "bfloat16" and ranks.device.type == "cuda"
    return torch.bfloat16 if is_bfloat16 else torch.float32


def load_reference(settings: Settings, ranks: Ranks, *, vocabulary: int) -> Policy | None:
    """Load the frozen policy that the KL is taken to; None if there is no KL.

    Raises:
        SettingsError: It does not have the policy's vocabulary.
    """
    algorithm = settings.algorithm
    if not algorithm.kl_coefficient:
        return None
    reference = freeze(load_policy(settings, ranks, model=algorithm.reference_model))
    if reference.vocabulary != vocabulary:
        raise SettingsError(
            f"algorithm.reference_model must have run.model's vocabulary of {vocabulary} tokens, "
            f"got {reference.vocabulary}; choose a relative of run.model"
        )
    return reference


def schedule(settings: Settings) -> Schedule:
    """Make the schedule of the learning rate from the settings."""
    learner = settings.learner
    return Schedule(
        peak=learner.lr,
        warmup_steps=learner.lr_warmup_steps,
        decay=learner.lr_decay,
        min_ratio=learner.lr_min_ratio,
        steps=settings.run.steps,
    )


def recovers_from(store: RetryingStore, settings: Settings, ledger: Ledger) -> None:
    """Have a store that lost writes put right from the ledger, whichever operation notices."""
    run, buffer = settings.run, settings.buffer
    store.on_rewind(
        lambda fresh, run_id: recover(fresh, run_id, run=run, buffer=buffer, facts=ledger.facts)
    )


def make_publisher(
    settings: Settings, ranks: Ranks, store: RetryingStore, policy: Policy, ledger: Ledger | None
) -> WeightPublisher:
    """Start the weight publisher; its pointer goes into the store under this learner's lineage."""

    def put(publication: Publication) -> None:
        assert ledger is not None, "only rank 0 has something to point to"
        ledger.publish(publication)
        publish_pointer(store, publication)

    # An engine that scores a prompt samples one token more.
    room = settings.run.max_prompt_tokens + settings.run.max_completion_tokens - 1
    probe_ids = [(11 + 7919 * t) % policy.vocabulary for t in range(min(PROBE_TOKENS, room))]
    return WeightPublisher(
        policy.causal_lm,
        settings.run,
        settings.learner,
        rank=ranks.rank,
        keys=settings.broker.keys or settings.run.folder / "keys",
        probe_ids=probe_ids,
        point=put,
        probe=lambda _, token_ids: probe_logprobs(policy, token_ids),
    )
