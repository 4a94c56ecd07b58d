"""Assembly of an actor from settings: engine, tokenizer, environment, reward, connections.

`run_actor` and `run_teacher` are called by `actors/__main__.py`. They also register the key of the
process where it has none, and run its loop to its end.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
from collections.abc import Sequence
from functools import partial
from logging import INFO, WARNING

import structlog
from msgspec import structs

from actors.engine.choice import engine_device, engine_of_this_process, episodes_at_a_time
from actors.engine.tokenizer import ModelTokenizer, check_same_tokenizer
from actors.environments.base import Conversation
from actors.environments.registry import for_each, naming, try_environment
from actors.episodes.held_leases import SwapGate
from actors.episodes.maker import EpisodeMaker
from actors.rewards.pool import RewardPool
from actors.weights.links import ActorIdentity
from broker.client import BrokerClient, check_endpoints, client_of
from broker.protocol.messages import Enrol, Hello, Receipt
from broker.transport.keys import ACTOR, ENROLMENT, KeyPair, load_pair, new_pair
from configs.errors import RefusedError, SettingsError
from configs.hashes import run_hashes
from configs.machine import without_collection
from configs.settings import Settings

from .capacity import CacheMeter, leases_for
from .engine_of_settings import line_to_worker, make_engine
from .loop import GIVE_UP_S, ActorLoop, EpisodeTools, until_event
from .metrics_page import ActorPage
from .teacher import RECORDS_ON_CPU, RECORDS_ON_GPU, Teacher

FULL_S = 120.0  # to wait for a place: twice as long as a key is silent before another takes its own
FULL_PAUSE_S = 10.0
ENVIRONMENT_TIMEOUT_S = 60.0

log = structlog.get_logger()


def new_incarnation(name: str) -> str:
    """Name one incarnation of an actor; no two are the same, on any machine."""
    return f"{name}-{secrets.token_hex(4)}"


async def run_actor(
    settings: Settings, incarnation: str, stop: asyncio.Event, *, key: str | None = None
) -> None:
    """Run an actor until its run ends or `stop` is set; it then drains.

    Args:
        settings: Settings of the run.
        incarnation: Name of this life of the actor.
        stop: Ends the actor when it is set.
        key: Name of the actor's key; None = `actor`, or a new key that `enrolment` registers.

    Raises:
        NyalaError: A failure that ends the actor; `exit_code` says whether another start may help.
    """
    check_endpoints(settings)
    _log_engine(settings)
    log.info("starting", stage=f"looking for the broker at {settings.broker.endpoint}")
    keys = await until_event(_own_keys(settings, incarnation, key), stop.wait())
    if keys is None:
        return
    client = client_of(settings, keys, incarnation)
    meter = CacheMeter() if settings.actors.max_concurrent_episodes == "auto" else None
    with without_collection():
        engine, device = make_engine(settings, line := line_to_worker(settings), meter)
        from actors.weights.receiver import WeightReceiver  # noqa: PLC0415 - torch
    gate = SwapGate(hold_s=settings.actors.eval_hold_s)
    receiver = WeightReceiver(
        engine,
        settings.actors,
        caller=ActorIdentity(keys, settings.run.name, incarnation),
        staging=settings.run.folder / "staging",
        keys_folder=settings.keys_folder,
        device=device,
        place=line,
        gate=gate.wait,
        model=settings.run.model_path,
        on_brokers=client.learn,
    )
    loop = ActorLoop(
        greeting(settings, incarnation),
        run=settings.run,
        actors=settings.actors,
        max_message_bytes=settings.broker.max_message_bytes,
        broker=client,
        engine=engine,
        weights=receiver,
        gate=gate,
        prepare=lambda: prepare(settings, incarnation),
        meter=meter,
        group_wait_s=settings.broker.progress_timeout_s / 2,
    )
    page = ActorPage(loop, engine, receiver, settings)
    beside = [asyncio.create_task(work) for work in (_stop_after(stop, loop), page.pulse.keep())]
    try:
        with page.serving(settings, name=incarnation.rpartition("-")[0]):
            await loop.run()
    finally:
        for task in beside:
            task.cancel()
        await client.close()


async def run_teacher(
    settings: Settings, incarnation: str, stop: asyncio.Event, *, name: str, key: str | None = None
) -> None:
    """Run a teacher until its run ends or `stop` is set.

    Args:
        settings: Settings of the run.
        incarnation: Name of this life of the teacher.
        stop: Ends the teacher when it is set.
        name: Name of the teacher, one of `algorithm.teacher_processes`.
        key: As for an actor.

    Raises:
        NyalaError: A failure that ends the teacher; `exit_code` says whether another start may
            help.
    """
    check_endpoints(settings)
    model = _teacher_model(settings, name)
    _log_engine(settings)
    keys = await until_event(_own_keys(settings, incarnation, key), stop.wait())
    if keys is None:
        return
    client = client_of(settings, keys, incarnation)
    await asyncio.to_thread(check_same_tokenizer, settings.run, model)
    with without_collection():
        engine, device = make_engine(settings, teacher=model)
    hello = structs.replace(
        greeting(settings, incarnation),
        capacity=RECORDS_ON_GPU if device == "cuda" else RECORDS_ON_CPU,
        teacher=name,
    )
    teacher = Teacher(
        hello,
        actors=settings.actors,
        max_message_bytes=settings.broker.max_message_bytes,
        broker=client,
        engine=engine,
    )
    watch = asyncio.create_task(_stop_after(stop, teacher))
    try:
        await teacher.run()
    finally:
        watch.cancel()
        await client.close()


def _teacher_model(settings: Settings, name: str) -> str:
    models = settings.algorithm.teacher_processes
    if name not in models:
        raise SettingsError(
            f"--teacher must be a teacher that is a process of its own, "
            f"{' or '.join(sorted(models)) or 'of which this run has none'}, got {name!r}; set "
            "algorithm.teacher and algorithm.teacher_in: actor before the run begins"
        )
    return models[name]


def _log_engine(settings: Settings) -> None:
    """Log the engine and the reason for it; as a warning where this machine lacks something.

    Raises:
        SettingsError: The engine cannot start on this machine.
    """
    choice = engine_of_this_process(settings)
    is_lacking = settings.actors.engine == "auto" and choice.is_substitute
    log.log(WARNING if is_lacking else INFO, "engine", **choice._asdict())


def greeting(settings: Settings, incarnation: str) -> Hello:
    """Make the first message to the broker: identity, and hashes of the run's settings.

    Raises:
        SettingsError: A file that the settings name cannot be read.
    """
    places = episodes_at_a_time(settings, on_gpu=engine_device() == "cuda")
    return Hello(
        incarnation=incarnation,
        host=socket.gethostname(),
        pid=os.getpid(),
        hashes=run_hashes(settings.run),
        capacity=leases_for(places, settings.actors.max_episodes_in_flight),
    )


async def prepare(settings: Settings, incarnation: str) -> EpisodeTools:
    """Make environment, tokenizer and reward functions, and try them on a sample.

    The processes of reward functions run from then on; `RewardPool.close` ends them.

    Raises:
        SettingsError: One of them cannot be made by these settings.
        RewardError: The reward fails on the sample; the processes have been ended.
        DeadlineError: The environment is not made and tried within 60 s.
    """
    run = settings.run
    work = partial(try_environment, workers=settings.actors.environment_workers)
    tried = await asyncio.to_thread(
        lambda: list(for_each(run, work, limit_s=ENVIRONMENT_TIMEOUT_S))
    )
    tokenizer = await asyncio.to_thread(ModelTokenizer.for_run, run)
    limit_s = settings.actors.environment_timeout_s
    maker = EpisodeMaker(
        tokenizer, run, incarnation, limit_s=limit_s, teacher_of=settings.algorithm.scoring_teacher
    )
    rewards = await _reward_pools(settings, [sample for sample, _ in tried])
    return EpisodeTools(maker, [source for _, source in tried], rewards)


async def _reward_pools(
    settings: Settings, samples: Sequence[Conversation]
) -> list[RewardPool | None]:
    """Make the reward pool of each environment; environments with the same functions share one."""
    pools: dict[tuple[str, ...], RewardPool] = {}
    by_environment: list[RewardPool | None] = []
    try:
        alone = settings.run.by_environment.values()
        for run, sample in zip(alone, samples, strict=True):
            functions = tuple(run.reward_functions.values())
            if not functions:
                log.info("reward", function=f"the score of {run.environment}")
                by_environment.append(None)
                continue
            if functions not in pools:
                pools[functions] = RewardPool(run, settings.actors)
            with naming(run):
                log.info("reward", function=await pools[functions].try_out(sample))
            by_environment.append(pools[functions])
    except BaseException:
        for pool in pools.values():
            await pool.close()
        raise
    return by_environment


async def _own_keys(settings: Settings, incarnation: str, key: str | None) -> KeyPair:
    """Load the actor's own key pair, or make one and register it with the enrolment key.

    To register waits up to 120 s for a place among the actors.
    """
    folder = settings.keys_folder
    if key is not None or (folder / f"{ACTOR}.key").exists():
        return load_pair(folder, key or ACTOR)
    pair = new_pair()
    client = client_of(settings, load_pair(folder, ENROLMENT), incarnation)
    try:
        receipt = await _enrolled(client, Enrol(pair.public.decode()))
    finally:
        await client.close()
    log.info("starting", stage="enrolled", key=receipt.text)
    return pair


async def _enrolled(client: BrokerClient, request: Enrol) -> Receipt:
    """Register a key; while there is no place, wait for other actors to leave theirs."""
    began = asyncio.get_running_loop().time()
    while True:
        try:
            return await client.order(request, deadline_s=GIVE_UP_S)
        except RefusedError as refusal:
            waited_s = asyncio.get_running_loop().time() - began
            if refusal.code != "full" or waited_s > FULL_S:
                raise
            log.warning("no place for this actor yet", reason=str(refusal))
        await asyncio.sleep(FULL_PAUSE_S * random.uniform(0.5, 1.5))


async def _stop_after(stop: asyncio.Event, loop: ActorLoop | Teacher) -> None:
    """Stop the loop once `stop` is set."""
    await stop.wait()
    loop.stop()
