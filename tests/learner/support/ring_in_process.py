"""The learner's loop with a real store and a thread that acts; weights stay in memory.

The task: the prompt is one token, and so is the answer; it must be of the same class modulo 4.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from broker.protocol.messages import TaskSpec
from buffer import operations
from buffer.record.episode import Episode, PolicyVersion
from buffer.store import Store
from configs.errors import StoreUnreachable
from configs.settings import Settings
from learner.assembly import load_policy, load_reference, load_teachers, recover_from
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.resume import take_over
from learner.coordinator import RankComponents
from learner.data.retrying_store import RetryingStore
from learner.loop import Loop
from learner.model.ranks import Ranks
from learner.model.sequence_cost import SequenceCost
from learner.rank_zero import RankZero
from learner.reporting.metrics_page import LearnerPage
from learner.training.guards import Guard
from learner.training.optimizer import Schedule, ScheduledOptimizer
from learner.weights.layout import unwrapped_name
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.tiny_policy import save_tiny_model
from tests.learner.support.tiny_run import answer_leases

NOTHING_YET = PolicyVersion(0, 0)
FIRST_TOKEN, NUM_ITEMS, CLASSES = 10, 16, 4
ITEMS_I1 = torch.arange(FIRST_TOKEN, FIRST_TOKEN + NUM_ITEMS)[:, None]


class LifeEnded(Exception):
    """Stands for a kill: raised out of the middle of a life."""


@dataclass
class Shelf:
    """A publisher that keeps every version in memory; an actor reads the newest."""

    model: nn.Module | None = None
    version: PolicyVersion = NOTHING_YET
    history: dict[PolicyVersion, list[Tensor]] = field(default_factory=dict)
    end_life_at: int | None = None
    """Raise when this step is published."""
    on_publish: Callable[[int], None] = lambda _: None

    def publish(
        self, model: nn.Module, version: PolicyVersion, *, free: Callable[[], None]
    ) -> None:
        """Copy the parameters, and end the life if it is time to."""
        parameters = {}
        for name, p in model.named_parameters():
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            parameters[unwrapped_name(name)] = whole.detach().clone()
        self.history[version] = [*parameters.values()]
        if self.model is not None:
            with torch.no_grad():  # adapters are left out: an actor here has whole weights
                for name, ours in self.model.named_parameters():
                    ours.copy_(parameters[name])
        self.version = version
        self.on_publish(version.step)
        free()
        if version.step == self.end_life_at:
            self.end_life_at = None
            raise LifeEnded


SHORT_LEASE_MS = 300  # where leases are lost with the store's last seconds, nobody waits long


class ActorThread:
    """Leases, samples one token for each task with the newest weights, and submits.

    One that bears outages does a broker's part as well: it compares the server's run_id on connect,
    and reaps.
    """

    def __init__(self, url: str, settings: Settings, shelf: Shelf, *, bears_outages: bool) -> None:
        admits = (lambda *_: True) if bears_outages else None
        self._store = Store(url, settings.run.name, admits=admits)
        self._bears_outages = bears_outages
        self._shelf = shelf
        self._seen = NOTHING_YET
        self._logits_IV = torch.empty(0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> ActorThread:
        """Begin to act."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop acting."""
        self._stopping.set()
        self._thread.join()
        self._store.close()

    @torch.no_grad()
    def _work(self) -> None:
        assert self._shelf.model is not None
        while not self._stopping.is_set():
            version = self._shelf.version
            if version not in (NOTHING_YET, self._seen):
                self._logits_IV = self._shelf.model(ITEMS_I1).logits[:, -1]
                self._seen = version
            if version == NOTHING_YET or not self._act(version):
                self._stopping.wait(0.005)

    def _act(self, version: PolicyVersion) -> int:
        answer = partial(self._answer, version=version)
        if not self._bears_outages:
            return answer_leases(self._store, version, answer)
        try:
            self._store.run(operations.reap(max_attempts=1000, batch=256))
            return answer_leases(self._store, version, answer, ttl_ms=SHORT_LEASE_MS)
        except StoreUnreachable:
            return 0

    def _answer(self, task_id: int, spec: TaskSpec, *, version: PolicyVersion) -> Episode:
        item = spec.index % NUM_ITEMS
        prompt, logits = FIRST_TOKEN + item, self._logits_IV[item]
        log_mu = (logits / (spec.temperature or 1.0)).log_softmax(-1)
        token = int(torch.multinomial(log_mu.exp(), 1) if spec.temperature else logits.argmax())
        return make_episode(
            task_id,
            group_id=spec.group_id,
            prompt=[prompt],
            completion=[token],
            logprobs=[min(0.0, float(log_mu[token]))],
            reward=float(token % CLASSES == prompt % CLASSES),
            versions=[(version, 0)],
            purpose=spec.purpose,
        )


class RingInProcess:
    """A run whose learner can live several times."""

    def __init__(
        self, settings: Settings, url: str, ranks: Ranks, *, patience_s: float = 0.0
    ) -> None:
        self.patience_s = patience_s
        self.settings = settings
        self.url = url
        self.ranks = ranks
        self.shelf = Shelf()
        self.stopping = threading.Event()
        self.page = LearnerPage(limit_s=settings.learner.collective_timeout_s)
        if not Path(settings.run.model_path).exists():
            save_tiny_model(Path(settings.run.model_path))

    def live(self) -> bool:
        """Run one life of the learner beside an actor."""
        settings, ranks = self.settings, self.ranks
        policy = load_policy(settings, ranks, is_trained=True)
        optimizer = ScheduledOptimizer(policy, Schedule.from_settings(settings), settings.learner)
        checkpoints = Checkpoints(
            settings.run.folder / "checkpoints", keep=settings.learner.keep_checkpoints, ranks=ranks
        )
        with Store(self.url, settings.run.name, admits=lambda *_: False) as raw:
            store = RetryingStore(raw, patience_s=self.patience_s)
            start = take_over(settings.run, settings.buffer, store, checkpoints)
            if start.checkpoint is not None:
                checkpoints.load(start.checkpoint, policy, optimizer)
            path = settings.run.model_path
            self.shelf.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            ledger = start.ledger()
            recover_from(store, settings, ledger)
            components = RankComponents(
                run=settings.run,
                learner=settings.learner,
                algorithm=settings.algorithm,
                start=start,
                ranks=ranks,
                coordinator=RankZero(
                    settings,
                    store,
                    ranks,
                    start,
                    under_way=checkpoints.under_way,
                    ledger=ledger,
                    vocabulary=policy.vocabulary,
                    cost=SequenceCost.from_config(policy.causal_lm.config.to_dict()),
                    page=self.page,
                    stopping=self.stopping,
                ),
                policy=policy,
                optimizer=optimizer,
                guard=Guard(settings.guards, settings.algorithm, start.state.guards),
                checkpoints=checkpoints,
                publisher=self.shelf,
                reference=load_reference(settings, ranks, policy),
                teachers=load_teachers(settings, ranks, policy),
                stopping=self.stopping,
            )
            self.shelf.version = NOTHING_YET
            bears_outages = self.patience_s > 0
            with ActorThread(self.url, settings, self.shelf, bears_outages=bears_outages):
                return Loop(components).run()
