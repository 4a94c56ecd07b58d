"""From a lease to a rollout, and from a finished rollout to an episode.

`begin_episode` runs where the environment is called (`environment_workers.py`); there is no I/O
here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import structlog

from actors.chat import read_prompt
from actors.engine.tokenizer import Tokenizer
from actors.engine.turns import StopStrings
from actors.environments.agent import AgentTask
from actors.environments.base import Conversation, Environment, Score, tools_of
from actors.environments.calls import call
from actors.rewards.functions import RewardSample
from broker.protocol.messages import Lease, TaskSpec
from buffer.record.codec import decode_completion, join_completions
from buffer.record.episode import INDEX, Completion, Episode
from buffer.record.rules import EpisodeLimits, check_log
from configs.errors import NyalaError, RecordError
from configs.settings import RunSettings
from configs.tables.environments import MixtureItem
from configs.tables.run import UNIFORM

from .agent_rollout import AgentRollout
from .rollout import ReplayMismatch, Rollout, RolloutContext

log = structlog.get_logger()

CACHED_PROMPTS = 4096  # more than the groups in flight: members of a group share a prompt
MAX_METADATA_CHARACTERS = 400  # for people who look at a record


class EpisodeError(NyalaError):
    """The episode cannot be made, here or on any other actor."""


class EpisodeMaker:
    """Begins episodes and makes their records, for one incarnation of an actor."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        run: RunSettings,
        incarnation: str,
        *,
        limit_s: float = 30.0,
        teacher_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        """Prepare.

        Args:
            tokenizer: Tokenizer of the model.
            run: Settings of the run.
            incarnation: Name of this life of the actor.
            limit_s: Time limit of one call of an `async` environment.
            teacher_of: Names the teacher of an environment; empty = none.
        """
        self._tokenizer = tokenizer
        self._run = run
        self._limits = EpisodeLimits.for_run(run, vocabulary=None)
        stops = StopStrings(run.stop, tokenizer.decode) if run.stop else None
        self._context = RolloutContext(
            tokenizer, incarnation, run.max_completion_tokens, limit_s, stops
        )
        self._teacher_of = teacher_of
        self._names, self._mixture = list(run.by_environment), run.mixture
        self._encode = lru_cache(CACHED_PROMPTS)(tokenizer.encode_prompt)

    def place(self, spec: TaskSpec) -> MixtureItem:
        """Find the item of a task."""
        find = self._mixture.held_out if spec.purpose == "eval" else self._mixture.training
        return find(spec.index)

    def teacher(self, spec: TaskSpec) -> str:
        """Name the teacher that must score the episode of a task; empty = none."""
        if spec.purpose == "eval":
            return ""
        return self._teacher_of(self._names[self.place(spec).environment])

    async def begin_any(self, lease: Lease, environment: Environment) -> Rollout | AgentRollout:
        """Begin the episode of a lease, or continue the tokens of earlier leases.

        Tokens that cannot be continued are dropped: the episode then begins anew, as `restarted`.

        Args:
            lease: Lease of the task.
            environment: Environment of the task's item.

        Raises:
            EpisodeError: The prompt is too long.
            SettingsError: The prompt is neither a text nor messages that the model takes.
            DeadlineError: An `async` method of the environment takes too long.
            Exception: The environment raised it.
        """
        conversation = await self._conversation(lease, environment)
        if isinstance(conversation, AgentTask):
            return self._begin_agent(lease, conversation)
        return await self._begin_played(lease, environment, conversation)

    async def begin_episode(self, lease: Lease, environment: Environment) -> Rollout:
        """Begin an episode that needs no live agent; as `begin_any` otherwise."""
        rollout = await self.begin_any(lease, environment)
        if isinstance(rollout, AgentRollout):
            raise EpisodeError(
                "run.environment must be one that is played without live agents here, got agent; "
                "start a run, and `nyala agents` beside it"
            )
        return rollout

    async def _begin_played(
        self, lease: Lease, environment: Environment, conversation: Conversation
    ) -> Rollout:
        try:
            if lease.chunks and not getattr(environment, "can_replay", True):
                raise ReplayMismatch("its environment cannot repeat its answers")
            partial = _partial(lease, self._limits)
            rollout = self._begin(lease, conversation)
            if partial is not None and len(partial.token_ids):
                await rollout.resume(partial)
            return rollout
        except (ReplayMismatch, RecordError) as error:
            log.warning("episode restarts", task_id=lease.task_id, reason=str(error))
        rollout = self._begin(lease, await self._conversation(lease, environment))
        rollout.restarted = True
        return rollout

    def sample(self, rollout: Rollout | AgentRollout) -> RewardSample:
        """Make the arguments of a reward function from a finished episode."""
        assert rollout.score is not None
        spec = rollout.lease.spec
        place = self.place(spec)
        token_ids = tuple(rollout.completion().token_ids.tolist())
        return RewardSample.from_conversation(
            rollout.conversation,
            rollout.turns,
            index=place.item,
            purpose=spec.purpose,
            environment_reward=rollout.score.reward,
            completion=rollout.text(),
            prompt_ids=rollout.prompt_ids,
            completion_ids=token_ids,
            data_source=self._names[place.environment],
        )

    def episode(
        self,
        rollout: Rollout | AgentRollout,
        score: Score,
        *,
        started_at: float,
        finished_at: float,
    ) -> Episode:
        """Make the episode of a finished rollout.

        Args:
            rollout: The finished rollout.
            score: Its reward: the environment's, or that of a reward function.
            started_at: When this lease began generating, Unix seconds.
            finished_at: When the last token came, Unix seconds.
        """
        lease = rollout.lease
        metrics = {
            "num_turns": float(rollout.num_turns),
            "resumed_tokens": float(rollout.resumed_at),
            "restarted": float(rollout.restarted),
        }
        answer = (rollout.conversation.answer or "")[:MAX_METADATA_CHARACTERS]
        metadata = {"answer": answer}
        if self._run.sampler != UNIFORM:
            metadata[INDEX] = str(lease.spec.index)
        return Episode(
            task_id=lease.task_id,
            group_id=lease.spec.group_id,
            purpose=lease.spec.purpose,
            prompt_ids=rollout.prompt_array(),
            completion=rollout.completion(),
            reward=score.reward,
            reward_parts=score.parts,
            finish_reason=rollout.finish_reason,
            environment_metrics=metrics | score.metrics,
            incarnation=self._context.incarnation,
            started_at=started_at,
            finished_at=finished_at,
            metadata=metadata,
        )

    async def _conversation(self, lease: Lease, environment: Environment) -> Conversation:
        spec = lease.spec
        conversation: Conversation = await call(
            environment.begin,
            self.place(spec).item,
            spec.seed,
            held_out=spec.purpose == "eval",
            limit_s=self._context.limit_s,
        )
        return conversation

    def _begin_agent(self, lease: Lease, task: AgentTask) -> AgentRollout:
        """Begin the episode of a live agent, or continue it; it is never begun again here."""
        alone = list(self._run.by_environment.values())[self.place(lease.spec).environment]
        return AgentRollout(
            lease,
            task,
            self._context,
            max_prompt_tokens=self._run.max_prompt_tokens,
            has_reward=bool(alone.reward_functions),
            partial=_partial(lease, self._limits),
        )

    def _begin(self, lease: Lease, conversation: Conversation) -> Rollout:
        prompt_ids = self._encode(read_prompt(conversation.prompt), tools_of(conversation))
        limit, item = self._run.max_prompt_tokens, self.place(lease.spec).item
        if len(prompt_ids) > limit:
            raise EpisodeError(
                f"prompt must be at most run.max_prompt_tokens = {limit}, got {len(prompt_ids)} "
                f"tokens for item {item}; shorten or leave out such prompts, or raise the limit "
                "and begin the run anew with --fresh"
            )
        return Rollout(lease, conversation, prompt_ids, self._context)


def _partial(lease: Lease, limits: EpisodeLimits) -> Completion | None:
    """Decode the chunks of a lease.

    Raises:
        RecordError: They are malformed, not as many tokens as the store counts, or more than an
            episode of this run can have; or this lease's tokens could not follow them.
    """
    if not lease.chunks:
        return None
    partial = join_completions([decode_completion(chunk) for chunk in lease.chunks])
    if len(partial.token_ids) != lease.length:
        raise RecordError(
            f"chunks of a lease must have {lease.length} tokens, got {len(partial.token_ids)}"
        )
    check_log(partial.branches)
    limits.check_completion(partial.branches, lease.length)
    last = partial.fences[-1].fence if partial.fences else 0
    if last > lease.fence:
        raise RecordError(f"fences of its chunks must be up to {lease.fence}, got {last}")
    return partial
