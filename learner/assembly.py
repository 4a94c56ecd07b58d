"""Start of the learner on one rank: join, load, resume, run.

Wires the components in the order of their dependencies, and logs each stage.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog
import torch

from broker.protocol.messages import Publication
from buffer.operations.run import brokers
from buffer.store import Store
from configs.architecture import present_model
from configs.errors import SettingsError
from configs.machine import compiled_folders
from configs.secrets import redis_url
from configs.settings import LearnerSettings, ParallelSettings, RunSettings, Settings
from configs.validation.learner import check_heads
from configs.worker import Worker
from learner.algorithm.user_losses import register_user_losses
from learner.checkpointing.bucket_copies import BucketCopies
from learner.checkpointing.checkpoint import BackgroundSave, Checkpoints
from learner.checkpointing.folders import FOLDER
from learner.checkpointing.recovery import publish_pointer, recover
from learner.checkpointing.resume import StartState, take_over
from learner.data.evaluation import is_due
from learner.data.ledger import Ledger
from learner.data.records import Records
from learner.data.retrying_store import RetryingStore
from learner.data.teachers import check_tokenizer, teacher_prompt_of
from learner.model.activations import choose
from learner.model.compilers import has_kernels
from learner.model.lora import adapt, begin_adapters
from learner.model.memory_rules import base_dtype
from learner.model.policy import Policy, freeze, probe_scores, rounded_logprobs, shard
from learner.model.ranks import Ranks, join
from learner.model.rendezvous import RENDEZVOUS_FILE, without_launchers
from learner.model.saved_model import (
    allocate,
    check_first_layers,
    empty_causal_lm,
    read_weights,
)
from learner.model.sequence_cost import SequenceCost
from learner.reporting.metrics_page import LearnerPage
from learner.training.critic import Critic, make_critic
from learner.training.guards import Guard
from learner.training.optimizer import Schedule, ScheduledOptimizer
from learner.weights.layout import DTYPES
from learner.weights.log import VersionDelivery
from learner.weights.probe import NUM_TOKENS, PolicyProbe
from learner.weights.publish import FollowerPublisher, WeightPublisher

from .coordinator import Coordinator, FollowerRank, RankComponents, Teachers
from .loop import Loop
from .rank_zero import RankZero
from .stopping import SHARE_TO_END, Leave

log = structlog.get_logger()

LEAVE_S = 3.0
"""Most time for closing the publisher and the files of a run when a process leaves in mid-batch."""


def run_learner(settings: Settings, stopping: threading.Event, leave: Leave | None = None) -> bool:
    """Run the learner; True when the run has finished, False when asked to stop before.

    A stop in mid-batch, or out of time, calls `leave` in another thread, which ends the process.

    Raises:
        SettingsError: A person has to change something first.
        CheckpointError: The checkpoints cannot be trusted, or do not belong to this store.
        NyalaError: As `Loop.run` and `make_publisher` raise it.
    """
    ranks = join_ranks(settings.learner, settings.parallel)
    load_user_losses(settings, ranks)
    admits = (lambda *_: False) if ranks.is_first else None  # a restarted Redis, until recovered
    url = redis_url(settings.run, settings.buffer)
    page = LearnerPage(limit_s=settings.learner.collective_timeout_s)
    served = page.serving(settings, is_first=ranks.is_first)
    with served, Store(url, settings.run.name, admits=admits) as raw_store:
        store = RetryingStore(raw_store, stopping=stopping)
        log.info("starting", stage="loading the model")
        policy = load_policy(settings, ranks, is_trained=True)
        reference, teachers = load_frozen(settings, ranks, policy)
        optimizer = ScheduledOptimizer(policy, Schedule.from_settings(settings), settings.learner)
        critic = load_critic(policy, settings, ranks)
        checkpoints = make_checkpoints(settings, ranks, critic)
        log.info("starting", stage="taking the run over")
        start = _agree_on_start(settings, store, ranks, checkpoints, vocabulary=policy.vocabulary)
        _resume(start, checkpoints, policy, optimizer)
        log.info("starting", stage="starting the publisher")
        parts, under_way = (settings, store, ranks, policy, start), checkpoints.under_way
        coordinator, publisher = (
            _lead(*parts, under_way=under_way, page=page, stopping=stopping)
            if ranks.is_first
            else _follow(*parts, under_way=under_way)
        )
        try:
            log.info("starting", stage="waiting for episodes")
            components = RankComponents(
                run=settings.run,
                learner=settings.learner,
                algorithm=settings.algorithm,
                start=start,
                ranks=ranks,
                coordinator=coordinator,
                policy=policy,
                optimizer=optimizer,
                guard=Guard(settings.guards, settings.algorithm, start.state.guards),
                checkpoints=checkpoints,
                publisher=publisher,
                reference=reference,
                teachers=teachers,
                critic=critic,
                stopping=stopping,
                leave=_leaving(publisher, coordinator, leave, settings.console.stop_timeout_s),
                are_all_told=RENDEZVOUS_FILE in os.environ,  # their launcher is on this machine
                grace_s=settings.console.stop_timeout_s,
            )
            return Loop(components).run()
        finally:
            publisher.close()
            ranks.destroy_process_group()


def _resume(
    start: StartState, checkpoints: Checkpoints, policy: Policy, optimizer: ScheduledOptimizer
) -> None:
    """Load the checkpoint to start with, if there is one."""
    if start.checkpoint is not None:
        log.info("starting", stage="loading the checkpoint", path=str(start.checkpoint))
        checkpoints.load(start.checkpoint, policy, optimizer)


def leave_limit_s(grace_s: float) -> float:
    """Return the seconds that closing may take, where a process is killed after `grace_s` s."""
    return min(LEAVE_S, SHARE_TO_END * grace_s)


def _leaving(
    publisher: WeightPublisher | FollowerPublisher,
    coordinator: Coordinator,
    leave: Leave | None,
    grace_s: float,
) -> Leave | None:
    """Return the function that ends this process in mid-batch."""
    if leave is None:
        return None
    return partial(_leave, publisher, coordinator, leave, leave_limit_s(grace_s))


def _leave(
    publisher: WeightPublisher | FollowerPublisher,
    coordinator: Coordinator,
    leave: Leave,
    limit_s: float,
    error: Exception | None,
) -> None:
    """Free the shared memory and all else that outlives a process, then end this one."""

    def close() -> None:
        publisher.close()
        coordinator.close()

    ending = Worker(close, name="leaving")
    with suppress(Exception):  # no error of what is closed keeps the process
        ending.start().join(limit_s)
    leave(error)


def join_ranks(learner: LearnerSettings, parallel: ParallelSettings) -> Ranks:
    """Join the process group as the settings say; collective."""
    log.info("starting", stage="joining the process group")
    return join(
        learner.device,
        threads=learner.threads,
        parallel=parallel,
        timeout_s=learner.collective_timeout_s,
    )


def load_user_losses(settings: Settings, ranks: Ranks) -> None:
    """Check and register the user's functions of the loss.

    Raises:
        SettingsError: One of them is missing or wrong.
    """
    lag = settings.run.max_policy_lag
    for name in register_user_losses(settings.algorithm, max_policy_lag=lag, device=ranks.device):
        log.info("training with a function of the user", setting=name)


def _agree_on_start(
    settings: Settings,
    store: RetryingStore,
    ranks: Ranks,
    checkpoints: Checkpoints,
    *,
    vocabulary: int,
) -> StartState:
    """Take the run over on rank 0, and broadcast the state at which it begins."""
    if not ranks.is_first:
        checkpoints.newest()  # as rank 0 does in `take_over`
        return StartState.decode(ranks.broadcast(None))
    run, buffer = settings.run, settings.buffer
    start = take_over(run, buffer, store, checkpoints, vocabulary=vocabulary)
    ranks.broadcast(start.encode())
    return start


def _lead(
    settings: Settings,
    store: RetryingStore,
    ranks: Ranks,
    policy: Policy,
    start: StartState,
    *,
    under_way: BackgroundSave,
    page: LearnerPage,
    stopping: threading.Event,
) -> tuple[Coordinator, WeightPublisher]:
    """Make the parts that only rank 0 has."""
    ledger = start.ledger()
    recover_from(store, settings, ledger)
    coordinator = RankZero(
        settings,
        store,
        ranks,
        start,
        under_way=under_way,
        ledger=ledger,
        vocabulary=policy.vocabulary,
        cost=SequenceCost.from_config(policy.causal_lm.config.to_dict()),
        page=page,
        stopping=stopping,
    )
    publisher = make_publisher(settings, store, policy, ledger, on_delivered=page.delivered)
    return coordinator, publisher


def _follow(
    settings: Settings,
    store: RetryingStore,
    ranks: Ranks,
    policy: Policy,
    start: StartState,
    *,
    under_way: BackgroundSave,
) -> tuple[Coordinator, FollowerPublisher]:
    """Make the parts that all other ranks have instead."""
    run = settings.run
    records = Records(store, run, settings.buffer, settings.rewards)
    publisher = FollowerPublisher(policy.causal_lm, run, probe=_probe(run, policy))
    return FollowerRank(ranks, records, start, under_way), publisher


def load_policy(
    settings: Settings, ranks: Ranks, *, model: str | None = None, is_trained: bool = False
) -> Policy:
    """Load a policy, sharded over the ranks, without dropout. Collective.

    Args:
        settings: Settings of the run.
        ranks: All ranks.
        model: Folder or name of the model; None = `run.model`.
        is_trained: Whether the policy is to be trained. It then has adapters, and its base the
            dtype, that the settings of the learner ask for.

    Raises:
        SettingsError: The model cannot be loaded, or does not fit `parallel` or `learner`.
    """
    path = present_model(settings.run) if model is None else model
    causal_lm = empty_causal_lm(path)
    check_heads(settings.parallel, causal_lm.config.to_dict())
    if ranks.is_first:  # another would find the same
        check_first_layers(causal_lm, path)
    learner = settings.learner
    dtype = compute_dtype(settings, ranks)
    if is_trained:
        if learner.compile or has_kernels(ranks.mesh.device_type):
            log.info("compiled code is kept", **compiled_folders())
        base = base_dtype(learner.base_dtype, is_narrow=dtype == torch.bfloat16)
        adapt(causal_lm, learner, base)
    head_dtype = torch.float32 if settings.run.head_dtype else None
    policy = Policy(causal_lm, temperature=settings.run.temperature, head_dtype=head_dtype)
    policy.sequence_group = ranks.sequence
    # As the sampler ran it: dropout would make ratios random. Gradients flow all the same.
    policy.eval()
    shard(
        policy,
        ranks.mesh,
        dtype=dtype,
        activations=choose(learner, policy, ranks.device),
        offload=learner.offload,
        compiled=learner.compile,
        tensor=ranks.tensor,
    )
    allocate(policy, ranks.device, offload="parameters" in learner.offload)
    read_weights(causal_lm, path)
    if is_trained:
        policy.adapter = begin_adapters(causal_lm, learner, dtype=settings.run.dtype, ranks=ranks)
    return policy


def load_critic(policy: Policy, settings: Settings, ranks: Ranks) -> Critic | None:
    """Make the critic; None if the settings ask for none. Collective where there is one.

    Raises:
        SettingsError: The model of the critic cannot be loaded.
    """
    return make_critic(
        policy,
        settings.critic,
        settings.learner,
        model_path=settings.run.model_path,
        ranks=ranks,
        dtype=compute_dtype(settings, ranks),
    )


def make_checkpoints(settings: Settings, ranks: Ranks, critic: Critic | None) -> Checkpoints:
    """Make the checkpoints of the run, as the settings keep and copy them; nothing is read yet.

    Raises:
        SettingsError: `learner.checkpoint_url` names a filesystem that is not installed.
    """
    learner = settings.learner
    return Checkpoints(
        settings.run.folder / FOLDER,
        keep=learner.keep_checkpoints,
        ranks=ranks,
        critic=critic,
        is_evaluated=lambda step: learner.keep_best and is_due(settings.run, step),
        copies=BucketCopies.from_settings(settings),
    )


def compute_dtype(settings: Settings, ranks: Ranks) -> torch.dtype:
    """Choose the dtype of forward and backward passes; on a CPU it is always float32."""
    # On a CPU the backward pass is as fast in float32, and exact.
    is_bfloat16 = settings.run.dtype == "bfloat16" and ranks.device.type == "cuda"
    return torch.bfloat16 if is_bfloat16 else torch.float32


def load_frozen(settings: Settings, ranks: Ranks, policy: Policy) -> tuple[Policy | None, Teachers]:
    """Load the models that are not trained."""
    return load_reference(settings, ranks, policy), load_teachers(settings, ranks, policy)


def load_reference(settings: Settings, ranks: Ranks, policy: Policy) -> Policy | None:
    """Load the frozen policy that the KL penalty is taken to; None if there is no penalty.

    Where the policy has adapters and no `algorithm.reference_model` is set, the result is `policy`
    itself: without its adapters it is the model that the run began with. Collective.

    Raises:
        SettingsError: The reference does not have the policy's vocabulary, or cannot be loaded.
    """
    algorithm = settings.algorithm
    if not algorithm.kl_coefficient:
        return None
    if policy.adapter is not None and algorithm.reference_model is None:
        return policy
    reference = freeze(load_policy(settings, ranks, model=algorithm.reference_model))
    if reference.vocabulary != policy.vocabulary:
        raise SettingsError(
            f"algorithm.reference_model must have run.model's vocabulary of {policy.vocabulary} "
            f"tokens, got {reference.vocabulary}; choose a model with the tokenizer of run.model"
        )
    return reference


def load_teachers(settings: Settings, ranks: Ranks, policy: Policy) -> Teachers:
    """Load the frozen teachers that are in the learner. Collective.

    Where the policy has adapters, a teacher that is the model that the run began with is `policy`
    itself, without its adapters.

    Raises:
        SettingsError: A teacher has another tokenizer or cannot be loaded, or
            `algorithm.teacher_prompt` cannot be used.
    """
    algorithm = settings.algorithm
    teachers: list[Policy] = []
    for model in algorithm.teachers if algorithm.teacher_in == "learner" else ():
        if model is None and policy.adapter is not None:
            teachers.append(policy)
            continue
        if model is not None:
            check_tokenizer(settings.run, model)
        teacher = freeze(load_policy(settings, ranks, model=model))
        if teacher.vocabulary < policy.vocabulary:
            raise SettingsError(
                f"algorithm.teacher must have an embedding for each of run.model's "
                f"{policy.vocabulary} token ids, got {teacher.vocabulary}; choose a teacher with "
                "as many"
            )
        teachers.append(teacher)
    return Teachers(tuple(teachers), teacher_prompt_of(settings))


def recover_from(store: RetryingStore, settings: Settings, ledger: Ledger) -> None:
    """Have the store recovered from the ledger once an operation finds that it lost writes."""
    run, buffer = settings.run, settings.buffer
    store.on_rewind(
        lambda fresh, run_id: recover(fresh, run_id, run=run, buffer=buffer, facts=ledger.facts)
    )


def make_publisher(
    settings: Settings,
    store: RetryingStore,
    policy: Policy,
    ledger: Ledger,
    *,
    on_delivered: Callable[[VersionDelivery], None] = lambda _: None,
) -> WeightPublisher:
    """Start the weight publisher, which has a process of its own.

    Each version is announced in the store, under this learner's lineage. A store that is away when
    the learner is asked to stop is no error.

    Raises:
        SettingsError: The learner's key is missing.
        WeightsError: The process does not start.
    """

    def put_pointer(publication: Publication) -> None:
        ledger.publish(publication)
        with store.may_be_gone():
            publish_pointer(store, publication)

    run = settings.run
    return WeightPublisher(
        policy.causal_lm,
        run,
        settings.learner,
        keys=settings.keys_folder,
        put_pointer=put_pointer,
        probe=_probe(run, policy),
        on_delivered=on_delivered,
        find_brokers=lambda: store.run(brokers()),
        environment=without_launchers(os.environ),  # its actors may be on other networks
    )


def _probe(run: RunSettings, policy: Policy) -> PolicyProbe:
    # An engine that scores a prompt samples one token more.
    room = run.max_prompt_tokens + run.max_completion_tokens - 1
    return PolicyProbe(
        partial(probe_scores, policy),
        partial(rounded_logprobs, policy, dtype=DTYPES[run.dtype]),
        num_tokens=min(NUM_TOKENS, room),
        vocabulary=policy.vocabulary,
    )
