"""Samplers: which prompt a new group asks, by what training has shown of each prompt.

    batch trained -> results by prompt -> sampler -> choice, in ledger and task -> batch trained

A sampler is a pure function of the run's seed, the group and the pool of its environment, which has
the results of all trained batches. A choice is made once, before its task is created, and kept in
ledger and checkpoint, so recovery and later learners create the same task. The environment of a
group stays that of `run.environments`.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nsmallest
from itertools import chain
from random import Random
from typing import NamedTuple

import msgspec

from buffer.record.episode import INDEX, Episode
from configs.errors import SettingsError
from configs.settings import RunSettings
from configs.tables.run import UNIFORM
from configs.user_code import explain, load_user_code

MOST_PROMPTS = 100_000
"""Prompts of each environment whose results are kept, about 25 MB of memory and 6 MB of each
checkpoint. Beyond it, those that were trained longest ago count as unseen again."""
SOLVED = 0.95
"""Success from which a prompt is solved: after two groups without a wrong answer, or more where
there was one before."""
PRIOR = 1 / 8
"""Weight of the prior success of 1/2, in groups."""


class PromptResult(NamedTuple):
    """What training has shown of a prompt."""

    batch: int
    """The newest batch with a group of this prompt."""
    groups: int
    """Groups of it so far."""
    reward: float
    """Mean reward of the newest."""
    average: float
    """Mean reward of all, in which each group counts half as much as the one after it."""

    def followed_by(self, reward: float, batch: int) -> PromptResult:
        """Return the result with another group."""
        groups = self.groups + 1
        weight = _weight(groups)
        return PromptResult(batch, groups, reward, (self.average * (weight - 1) + reward) / weight)


@dataclass(frozen=True, slots=True)
class Results:
    """What training has shown of an environment's prompts."""

    prompts: Mapping[int, PromptResult] = field(default_factory=dict)
    """Number of a prompt -> its result."""
    low: float = 0.0
    """The lowest reward of an episode so far, at most 0."""
    high: float = 1.0
    """The highest reward of an episode so far, at least 1."""

    def followed_by(self, groups: Iterable[tuple[int, Sequence[float]]], batch: int) -> Results:
        """Return the results with further groups, of which those of the oldest prompts go.

        Args:
            groups: The prompt of each group, and the rewards of its episodes.
            batch: The batch that trained them.
        """
        prompts, low, high = dict(self.prompts), self.low, self.high
        for prompt, rewards in groups:
            before = prompts.get(prompt, PromptResult(0, 0, 0.0, 0.0))
            prompts[prompt] = before.followed_by(sum(rewards) / len(rewards), batch)
            low, high = min(low, *rewards), max(high, *rewards)
        excess = max(0, len(prompts) - MOST_PROMPTS)
        for prompt in nsmallest(
            excess, prompts, key=lambda prompt: (prompts[prompt].batch, prompt)
        ):
            del prompts[prompt]
        return Results(prompts, low, high)


@dataclass
class Pool:
    """What a sampler chooses from: the prompts of one environment.

    Producer: `PromptSampler`. Consumer: `difficulty`, or the sampler of a user.
    """

    environment: str
    num_prompts: int
    """A sampler returns a number from 0 to this one less 1."""
    step: int
    """Batches trained."""
    results: Results
    in_flight: AbstractSet[int]
    """Prompts of groups that were created and not yet trained."""

    @property
    def measured(self) -> Mapping[int, PromptResult]:
        """Prompts that have been trained, with their results; the others are unseen."""
        return self.results.prompts

    def success(self, prompt: int) -> float:
        """Estimate the share of right answers to a measured prompt.

        It is the prompt's average between the lowest and the highest reward of the environment,
        drawn towards 1/2 as long as there are few groups.
        """
        result, low = self.measured[prompt], self.results.low
        weight = _weight(result.groups)
        share = (result.average - low) / (self.results.high - low)
        return (weight * share + PRIOR / 2) / (weight + PRIOR)

    @cached_property
    def unsolved(self) -> Sequence[int]:
        """Measured prompts that are not solved, in order."""
        return sorted(prompt for prompt in self.measured if self.success(prompt) < SOLVED)

    @cached_property
    def solved(self) -> Sequence[int]:
        """Solved prompts, the one that was trained longest ago first."""
        return sorted(
            self.measured.keys() - set(self.unsolved),
            key=lambda prompt: (self.measured[prompt].batch, prompt),
        )


def _weight(groups: int) -> float:
    """Return the weight of all groups of a prompt, of which the newest has weight 1."""
    return 2 - 0.5 ** (groups - 1)


Sampler = Callable[[int, int, Pool], int]
"""(seed of the run, group, pool of its environment) -> number of a prompt."""

# --------------------------------------------------------------------------------------------------
# `run.sampler: difficulty`: prompts are drawn in proportion to p (1 - p).
#
# p is the share of right answers. A group whose answers are all right or all wrong has equal
# rewards, and under a group baseline no gradient; p (1 - p), the variance of a right-or-wrong
# reward, says how far a group is from that. It is the learnability of Rutherford et al. 2024
# (arXiv:2408.15099), which Foster et al. 2025 (arXiv:2502.12272) use for questions to language
# models. They measure it with extra episodes; here the trained ones are all there is, so some
# groups are spent on unseen prompts and on solved ones.

UNSEEN_SHARE = 1 / 4
"""Share of the groups that ask an unseen prompt while there is one."""
SOLVED_SHARE = 1 / 16
"""Share of the groups that ask the solved prompt trained longest ago, in case it fails now."""
DRAWS = 100  # a prompt that never succeeds is accepted in one of nine: all fail in 1 of 100,000


def difficulty(seed: int, group: int, pool: Pool) -> int:
    """Choose an unseen prompt, a solved one, or one in proportion to p (1 - p); none in flight.

    Where there is no such prompt, any is chosen.
    """
    random = Random(f"{seed} {group}")
    draw = random.random()
    kinds = [_unseen, _unsolved, _solved]
    if UNSEEN_SHARE <= draw < UNSEEN_SHARE + SOLVED_SHARE:
        kinds = [_solved, _unsolved, _unseen]
    elif draw >= UNSEEN_SHARE:
        kinds = [_unsolved, _unseen, _solved]
    for choose in kinds:
        prompt = choose(random, pool)
        if prompt is not None:
            return prompt
    return random.randrange(pool.num_prompts)


def _unseen(random: Random, pool: Pool) -> int | None:
    """Find an unseen prompt, the first from a random place on."""
    place = random.randrange(pool.num_prompts)
    places = chain(range(place, pool.num_prompts), range(place))
    return next((p for p in places if p not in pool.measured and p not in pool.in_flight), None)


def _unsolved(random: Random, pool: Pool) -> int | None:
    """Draw an unsolved prompt in proportion to p (1 - p)."""
    for _ in range(DRAWS if pool.unsolved else 0):
        prompt = random.choice(pool.unsolved)
        success = pool.success(prompt)
        if random.random() < 4 * success * (1 - success) and prompt not in pool.in_flight:
            return prompt
    return None


def _solved(_: Random, pool: Pool) -> int | None:
    """Find the solved prompt that was trained longest ago."""
    return next((prompt for prompt in pool.solved if prompt not in pool.in_flight), None)


# --------------------------------------------------------------------------------------------------
# The sampler of a run: results of batches, choices of groups, and their place in a checkpoint.


RewardsByPrompt = Mapping[tuple[int, int], Sequence[float]]
"""(training item, group) -> rewards of the group's episodes."""


def rewards_by_prompt(episodes: Iterable[Episode]) -> RewardsByPrompt:
    """Collect rewards by prompt and group; an episode that does not name its item is left out."""
    rewards: dict[tuple[int, int], list[float]] = defaultdict(list)
    for episode in episodes:
        if (item := episode.metadata.get(INDEX, "")).isdecimal():
            rewards[int(item), episode.group_id].append(episode.reward)
    return rewards


class CurriculumState(msgspec.Struct):
    """What a checkpoint keeps of choices and results. Producer, consumer: the learner's rank 0."""

    choices: dict[int, int]
    results: dict[int, Results]


class PromptSampler:
    """Chooses prompts as `run.sampler` says, and counts what training shows of them."""

    def __init__(self, run: RunSettings) -> None:
        """Load the sampler.

        Raises:
            SettingsError: The file or the function of `run.sampler` cannot be loaded.
        """
        self._run = run
        self._mixture = run.mixture
        self._environments = list(run.by_environment.items())
        self._sampler: Sampler = difficulty
        if run.sampler != "difficulty":
            self._sampler = load_user_code(run.sampler, setting="run.sampler", kind="function")

    def choose(
        self,
        group_ids: Iterable[int],
        *,
        step: int,
        results: Mapping[int, Results],
        in_flight: Iterable[int],
    ) -> dict[int, int]:
        """Choose the prompts of new groups, one group after the other.

        Args:
            group_ids: Ids of the groups.
            step: Batches trained.
            results: Number of an environment -> results of its prompts.
            in_flight: Training items of groups that were created and not yet trained.

        Returns:
            Group -> the training item whose prompt it asks.

        Raises:
            SettingsError: The sampler of the user raised, or returned no prompt of the pool.
        """
        asked: dict[int, set[int]] = defaultdict(set)
        for item in in_flight:
            place = self._mixture.training(item)
            asked[place.environment].add(place.item)
        pools: dict[int, Pool] = {}
        choices = {}
        for group in group_ids:
            number = self._mixture.training(group).environment
            if number not in pools:
                name, alone = self._environments[number]
                assert alone.sampler_prompts is not None, "settings are checked"
                pools[number] = Pool(
                    name, alone.sampler_prompts, step, results.get(number, Results()), asked[number]
                )
            prompt = self._call(group, pools[number])
            asked[number].add(prompt)
            choices[group] = self._mixture.training_item(number, prompt)
        return choices

    def try_out(self) -> None:
        """Call the sampler twice for each environment, before anything is measured.

        Raises:
            SettingsError: As `choose`, or the two answers differ.
        """
        groups = range(16 * len(self._environments))  # of each environment, at equal shares
        first, second = (self.choose(groups, step=0, results={}, in_flight=()) for _ in range(2))
        if first != second:
            raise SettingsError(
                f"run.sampler must return the same prompt for the same arguments, got different "
                f"ones from {self._run.sampler}; draw random numbers from "
                'random.Random(f"{seed} {group}")'
            )

    def measure(
        self, results: Mapping[int, Results], step: int, rewards: RewardsByPrompt
    ) -> dict[int, Results]:
        """Return the results with those of the groups of batch `step`.

        Args:
            results: Number of an environment -> results of its prompts.
            step: The batch.
            rewards: Rewards of its groups, without those that are trained again.
        """
        groups: dict[int, list[tuple[int, Sequence[float]]]] = defaultdict(list)
        for (item, _), of_group in rewards.items():
            number, prompt = self._mixture.training(item)
            groups[number].append((prompt, of_group))
        return {**results} | {
            number: results.get(number, Results()).followed_by(of_environment, step)
            for number, of_environment in groups.items()
        }

    def success_shares(self, results: Mapping[int, Results]) -> dict[str, float]:
        """Return the shares of the prompts by what is known of them, as `metrics.jsonl` has."""
        counts: dict[str, int] = dict.fromkeys(("hard", "medium", "easy", "solved"), 0)
        total = 0
        for number, (name, alone) in enumerate(self._environments):
            num_prompts = (alone.sampler_prompts or 0) * alone.is_trained
            total += num_prompts
            pool = Pool(name, num_prompts, 0, results.get(number, Results()), set())
            counts["solved"] += len(pool.solved)
            for prompt in pool.unsolved:
                success = pool.success(prompt)
                counts["hard" if success < 0.2 else "medium" if success < 0.8 else "easy"] += 1
        counts["unseen"] = total - sum(counts.values())
        return {f"prompts_{kind}": round(count / total, 4) for kind, count in counts.items()}

    def _call(self, group: int, pool: Pool) -> int:
        name = self._run.sampler
        try:
            answer: object = self._sampler(self._run.seed, group, pool)
        except Exception as error:
            raise SettingsError(
                f"run.sampler must return a prompt for group {group} of {pool.environment}, got an "
                f"error from {name}: {explain(error)}; mend it"
            ) from error
        try:
            prompt = -1 if isinstance(answer, bool) else operator.index(answer)  # type: ignore[arg-type]
        except TypeError:
            prompt = -1
        if not 0 <= prompt < pool.num_prompts:
            raise SettingsError(
                f"run.sampler must return a whole number from 0 to {pool.num_prompts - 1}, got "
                f"{answer!r:.60} from {name} for group {group} of {pool.environment}; return the "
                "number of a prompt"
            )
        return prompt


def make_sampler(run: RunSettings) -> PromptSampler | None:
    """Make the sampler of a run; None = uniform, where each group asks the prompt of its own id.

    Raises:
        SettingsError: As `PromptSampler` raises it.
    """
    return None if run.sampler == UNIFORM else PromptSampler(run)


def encode_curriculum(choices: Mapping[int, int], results: Mapping[int, Results]) -> str:
    """Write choices and results as a checkpoint keeps them; floats keep all their bits."""
    return msgspec.json.encode(CurriculumState(dict(choices), dict(results))).decode()


def decode_curriculum(text: str) -> CurriculumState:
    """Read what `encode_curriculum` wrote; nothing was kept of a run whose sampler is uniform.

    Raises:
        msgspec.MsgspecError: The text is something else.
    """
    return msgspec.json.decode(text, type=CurriculumState) if text else CurriculumState({}, {})
