"""Evidence of a batch as numbers, the window of recent evidence that rules see, and a rule's type.

Producer: `gathering.py`. Consumer: the rules. JSON can hold it, so that a run's evidence can be
kept and judged again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from configs.settings import Settings


@dataclass(frozen=True, slots=True)
class ActorShare:
    """The contribution of one actor to a batch."""

    episodes: int
    groups: int
    reward: float
    """Mean."""
    s_per_token: float
    """Mean over its episodes of the time from the first lease to the last token, per token."""


@dataclass(frozen=True, slots=True)
class EndShare:
    """Answers of a batch that ended in one way."""

    episodes: int
    reward: float
    """Mean reward of these answers."""
    blank: int = 0
    """Answers that say nothing before their end."""
    unread: int = 0
    """Answers in which the scorer found nothing to judge."""


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """Counts of the store when the batch was judged; those of events only grow."""

    actors: int = 0
    """Actors that were heard of lately."""
    leased: int = 0
    """Tasks that actors hold."""
    dead: int = 0
    """Dead letters since the run began."""
    death: str = ""
    """Why the newest of them died."""
    data_failures: int = 0
    """Episodes that reward or environment failed, retries included."""
    data_failure: str = ""
    """The newest such exception, with file and line."""
    paused: str = ""
    """Why nothing is leased; empty while tasks are."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Figures of a batch: shares of episodes or groups, times in seconds, entropy and KL in nats.

    A figure without a docstring is the one of that name in `metrics.jsonl`.
    """

    step: int
    episodes: int
    groups: int
    reward_mean: float
    reward_min: float
    reward_max: float
    reward_std: float
    varying_parts: tuple[str, ...] = ()
    """Parts of the reward that are not the same in all episodes."""
    zero_variance_groups: int = 0
    filtered_groups: int = 0
    """Groups of equal rewards that made way for others (dynamic sampling)."""
    response_truncated_fraction: float = 0.0
    unparsed: float | None = None
    """Share of answers that the scorer could not read; None = it does not count them."""
    response_length_mean: float = 0.0
    actors: dict[str, ActorShare] = field(default_factory=dict)
    """Incarnation -> its share."""
    run_past: dict[str, int] = field(default_factory=dict)
    """Special token -> answers in which the policy wrote it and went on."""
    ends: dict[str, EndShare] = field(default_factory=dict)
    """String of `run.stop`, or `""` for a token of the model -> the answers that it ended; empty in
    a run without such strings."""
    open_prompts: int = 0
    """Groups whose prompt ends with a token that ends a turn, so that no turn has begun."""
    entropy: float = 0.0
    effective_sample_size: float = 1.0
    kl: float = 0.0
    """The larger of KL(pi || mu) and KL(mu || pi), per token."""
    policy_lag_mean: float = 0.0
    lag0_tokens: int = 0
    lag0_logprob_diff_mean: float = 0.0
    lag0_temperature_excess: float = 0.0
    lag0_temperature_weight: float = 0.0
    clipped: float = 0.0
    """Share of tokens that a bound of the surrogate acted on."""
    wait_s: float = 0.0
    """Time waiting for episodes; 0 in the first batch of a life, which waits for the start."""
    span_s: float = 0.0
    """Time from the end of the batch before."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> groups dropped since the batch before."""
    masked: float = 0.0
    """Share of the sampled tokens of new groups that were context only because they were stale."""
    store: StoreFigures = StoreFigures()
    greedy_reward: float | None = None
    """Mean reward of the greedy answers of the first evaluation of this life; None before it."""
    looks: int = 0
    """Times since the previous batch that the store was asked while actors were present."""
    workless: int = 0
    """Those of `looks` at which no actor held a task."""
    cards: int = 0
    """GPUs of the learner's machine that it may use; 0 = it computes on a CPU."""
    cores: int = 0
    """CPU cores of the learner's machine, where it computes on a CPU."""


# --------------------------------------------------------------------------------------------------
# The newest batches of a run, and what rules need of those before.

MOST_BATCHES = 50
FIRST_BATCHES = 3


class Window:
    """Evidence of the newest batches, oldest first, and a short memory of the whole life."""

    def __init__(self) -> None:
        self._batches: deque[Evidence] = deque(maxlen=MOST_BATCHES)
        self._first: list[Evidence] = []
        self.best_reward = float("-inf")
        """Largest reward of an episode so far."""
        self.peak = (0.0, 0)
        """Largest KL so far, and its batch."""
        self.store = StoreFigures()
        """Figures as last read from the store, with a batch or while none came."""

    def add(self, evidence: Evidence) -> None:
        """Take the evidence of the next batch."""
        self._batches.append(evidence)
        if len(self._first) < FIRST_BATCHES:
            self._first.append(evidence)
        self.best_reward = max(self.best_reward, evidence.reward_max)
        self.peak = max(self.peak, (evidence.kl, evidence.step))
        self.store = evidence.store

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Evidence]:
        return iter(self._batches)

    def last(self, batches: int) -> Sequence[Evidence]:
        """Return the newest batches, at most so many."""
        return list(self._batches)[-batches:]

    @property
    def newest(self) -> Evidence:
        """The batch that was added last."""
        return self._batches[-1]

    @property
    def first(self) -> Sequence[Evidence]:
        """The first batches of this life, at most `FIRST_BATCHES`."""
        return self._first

    @property
    def first_entropy(self) -> float:
        """Entropy at the beginning of this life, nats."""
        return median(batch.entropy for batch in self._first)


def total(batches: Sequence[Evidence], of: Callable[[Evidence], float]) -> float:
    """Add up a figure of several batches."""
    return sum(of(batch) for batch in batches)


def middle(batches: Sequence[Evidence], of: Callable[[Evidence], float]) -> float:
    """Return the median of a figure over batches: one odd batch does not move it."""
    return median(of(batch) for batch in batches)


# --------------------------------------------------------------------------------------------------
# A rule, and its conclusion.

Conclusion = Callable[[Window, Settings, bool], str | None]
"""Maps the window, the settings and whether the rule holds already to one sentence, or None. A
rule that holds already ends at a milder threshold than it began at."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that detects one cause of bad training."""

    name: str
    conclude: Conclusion
    batches: int
    """Batches of evidence that the rule needs; 0 = it reads only the store's figures, and is judged
    even while no batch comes."""
    explains: frozenset[str] = frozenset()
    """Rules that are left out while this one holds: it is their cause."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The conclusion of a rule. Producer: `Advisor`. Consumers: `BatchLog`, the console."""

    rule: str
    text: str
    """Figures, cause and remedy, with the setting to change and its value now."""
