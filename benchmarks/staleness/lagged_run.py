"""Training on episodes of the policy of `lag` batches ago.

One process, no network. The parts are those of a run: the torch engine samples, `EpisodeMaker`
makes and scores the episodes, the learner plans, packs and trains them. Only their order is forced:
before batch k the engine is given the weights that the learner had after batch
max(0, k - 1 - lag), kept in memory. So the first `lag` batches are all sampled from the policy at
the start.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from actors.assembly import prepare
from actors.engine.engine import Delta
from actors.engine.torch_engine import TorchOptions, TorchStepper
from actors.environments.calls import drive
from actors.episodes.rollout import Rollout
from broker.protocol.messages import Lease, TaskSpec
from buffer.record.episode import Episode, PolicyVersion, VersionSpan
from configs.settings import Settings
from learner.data.batch import pack, plan_batch
from learner.data.curriculum import eval_task, training_task
from learner.model.policy import Policy
from learner.model.ranks import Ranks
from learner.model.saved_model import load_causal_lm
from learner.training.critic import make_critic
from learner.training.optimizer import Schedule, ScheduledOptimizer
from learner.training.step import train_batch

LINEAGE = 1


class LaggedActor:
    """The engine and the environment of an actor, called directly."""

    def __init__(self, settings: Settings) -> None:
        run = settings.run
        self._run = run
        tools = asyncio.run(prepare(settings, "staleness"))
        self._maker, self._environment = tools.maker, tools.environments[0].make()
        self._stepper = TorchStepper(
            TorchOptions(
                model=run.model_path,
                max_model_len=run.max_prompt_tokens + run.max_completion_tokens,
                max_concurrent=run.group_size * run.groups_per_batch,
                seed=run.seed,
            )
        )
        self._stepper.start()
        self._parameters = dict(self._stepper._model.named_parameters())

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Sample from these weights from now on."""
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])

    def batch(self, step: int, version: PolicyVersion) -> list[Episode]:
        """Sample what batch `step` trains on."""
        size = self._run.group_size * self._run.groups_per_batch
        ids = range((step - 1) * size, step * size)
        return self._sample([(i, training_task(self._run, i)) for i in ids], version)

    def accuracy(self, version: PolicyVersion) -> float:
        """Answer the held-out prompts greedily; the share of right answers."""
        tasks = [(i, eval_task(self._run, i, i)) for i in range(self._run.eval_episodes)]
        episodes = self._sample(tasks, version)
        return sum(episode.reward_parts["exact"] for episode in episodes) / len(episodes)

    def _sample(
        self, tasks: Iterable[tuple[int, TaskSpec]], version: PolicyVersion
    ) -> list[Episode]:
        rollouts: dict[int, Rollout] = {}
        for task_id, spec in tasks:
            rollouts[task_id] = drive(
                self._maker.begin_episode(Lease(task_id, 1, spec, 0, ()), self._environment)
            )
            request = rollouts[task_id].request()
            self._stepper.admit(task_id, request, request.max_tokens)
        return [self._finish(rollouts[task_id], turn) for task_id, turn in self._turns(version)]

    def _turns(self, version: PolicyVersion) -> Iterator[tuple[int, Delta]]:
        """Step until nothing runs; yield each task's turn when it has ended."""
        tokens: dict[int, list[int]] = {}
        logprobs: dict[int, list[float]] = {}
        while self._stepper.has_work:
            for sampled in self._stepper.step():
                tokens.setdefault(sampled.key, []).extend(sampled.token_ids)
                logprobs.setdefault(sampled.key, []).extend(sampled.logprobs)
                if sampled.finish_reason is not None:
                    sampled_all = tuple(tokens[sampled.key]), tuple(logprobs[sampled.key])
                    spans = (VersionSpan(version, 0),)
                    yield sampled.key, Delta("", *sampled_all, spans, sampled.finish_reason)

    def _finish(self, rollout: Rollout, turn: Delta) -> Episode:
        rollout.append_delta(turn)
        rollout.settle(drive(rollout.judge()))
        assert rollout.score is not None  # the environments of one turn end with it
        return self._maker.episode(rollout, rollout.score, started_at=0.0, finished_at=0.0)


class LaggedRun:
    """An actor and a learner of one process, the actor `lag` batches behind.

    Example:
        accuracies = LaggedRun(settings, lag=16, ranks=join("cpu", threads=1)).train()
    """

    def __init__(self, settings: Settings, *, lag: int, ranks: Ranks) -> None:
        """Load model and environment.

        Args:
            settings: Of the run; `run.max_policy_lag` is not looked at.
            lag: Batches between the policy that samples and the one that is trained.
            ranks: This process alone.
        """
        self._settings = settings
        self._ranks = ranks
        self._actor = LaggedActor(settings)
        learner = settings.learner
        self._policy = Policy(
            load_causal_lm(settings.run.model_path), temperature=settings.run.temperature
        )
        schedule = Schedule(
            peak=learner.lr,
            warmup_steps=learner.lr_warmup_steps,
            decay=learner.lr_decay,
            min_ratio=learner.lr_min_ratio,
            steps=settings.run.steps,
        )
        self._optimizer = ScheduledOptimizer(self._policy, schedule, learner)
        self._critic = make_critic(
            self._policy,
            settings.critic,
            learner,
            model_path=settings.run.model_path,
            ranks=self._ranks,
            dtype=torch.float32,
        )
        self._past: deque[Mapping[str, Tensor]] = deque([self._weights()], maxlen=lag + 1)

    def train(self) -> tuple[float, ...]:
        """Train all batches.

        Returns:
            Greedy accuracy on held-out prompts: before the first batch and every `run.eval_every`.
        """
        run = self._settings.run
        accuracies = [self._evaluate(0)]
        for step in range(1, run.steps + 1):
            behind = PolicyVersion(LINEAGE, step - len(self._past))
            self._actor.take(self._past[0])
            self._train(step, self._actor.batch(step, behind))
            self._past.append(self._weights())
            if step % run.eval_every == 0:
                accuracies.append(self._evaluate(step))
        return tuple(accuracies)

    def _train(self, step: int, episodes: Sequence[Episode]) -> None:
        settings = self._settings
        plan = plan_batch(
            step,
            episodes,
            ranks=1,
            settings=settings.algorithm,
            max_completion_tokens=settings.run.max_completion_tokens,
            microbatch_tokens=settings.learner.microbatch_tokens,
            num_minibatches=settings.algorithm.num_minibatches,
        )
        microbatches = pack(
            plan,
            episodes,
            settings=settings.algorithm,
            lineages={},
            lineage=LINEAGE,
        )
        train_batch(
            self._policy,
            self._optimizer,
            step,
            microbatches,
            settings=settings.algorithm,
            ranks=self._ranks,
            critic=self._critic,
        )

    def _evaluate(self, step: int) -> float:
        self._actor.take(self._weights())
        return self._actor.accuracy(PolicyVersion(LINEAGE, step))

    def _weights(self) -> dict[str, Tensor]:
        named = self._policy.causal_lm.named_parameters()
        return {name: parameter.detach().clone() for name, parameter in named}
