"""Facts that rank 0 asserts again after Redis lost writes.

    held (its batch is about to be sealed) -> trained -> checkpointed (inside a durable checkpoint)

Invariant: a group that weights contain, or soon will, is in exactly one of these. The loop, the
feeder and the publisher write; recovery reads, in whichever thread finds the store rewound. So the
facts are one frozen value, which the ledger replaces under its lock: a reader sees a state that
was true at one moment, and it stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from broker.protocol.messages import Publication
from buffer.operations.values import StaleMask

from .sampler import Results


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The ledger at one moment. Producer: `Ledger`. Consumers: recovery and checkpoints."""

    lineage: int
    owner: str
    """Id of the take-over that began this lineage."""
    lineages: Mapping[int, int]
    """lineage -> step it forked at, this one included."""
    step: int
    """Batches trained."""
    checkpoint_step: int
    """Batches inside the newest durable checkpoint."""
    checkpointed: frozenset[int]
    """Groups of the batches inside it."""
    reach: int
    """First group id not yet created, nor being created."""
    batches: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Groups of the batches since then: k -> trained, or k = step + 1, held."""
    reused: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Groups that those batches train again."""
    masks: Mapping[int, StaleMask | None] = field(default_factory=dict)
    """Masks that those batches are sealed with."""
    second_tries: Mapping[int, int] = field(default_factory=dict)
    """Group -> the dropped group whose prompt it asks again."""
    choices: Mapping[int, int] = field(default_factory=dict)
    """Group -> the training item whose prompt `run.sampler` chose for it, until the group is inside
    a durable checkpoint or dropped."""
    results: Mapping[int, Results] = field(default_factory=dict)
    """Number of an environment -> what its prompts were answered with, up to `step`; for
    `run.sampler`."""
    waiting: tuple[int, ...] = ()
    """Dropped groups whose prompts are to be asked again, oldest first."""
    open_rounds: frozenset[int] = frozenset()
    """Evaluation rounds of this lineage, by step, that wait for answers."""
    publication: Publication | None = None
    """The newest pointer to weights that this learner put into the store."""
    vocabulary: int | None = None
    """Tokens of the policy's model; the store keeps it for brokers."""

    @property
    def asked_again(self) -> dict[int, int | None]:
        """Dropped group -> its second try, None while it waits for one; the store keeps the same.

        A learner that starts later begins with what the store has of it.
        """
        waiting: dict[int, int | None] = dict.fromkeys(self.waiting)
        return waiting | {dropped: group for group, dropped in self.second_tries.items()}

    @property
    def asked(self) -> dict[int, int]:
        """Group -> the training item whose prompt it asks, where that is not its own number."""
        return {**self.second_tries, **self.choices}

    @property
    def untrained_choices(self) -> dict[int, int]:
        """Choices for groups that are not yet trained."""
        trained = {group for k in self.batches if k <= self.step for group in self.batches[k]}
        return {group: item for group, item in self.choices.items() if group not in trained}

    def groups_up_to(self, step: int) -> frozenset[int]:
        """Collect the groups of all batches up to `step`."""
        recent = (groups for k, groups in self.batches.items() if k <= step)
        return self.checkpointed.union(*recent)


class Ledger:
    """The facts of one learner, on rank 0; any thread may read and write."""

    def __init__(self, facts: LedgerSnapshot) -> None:
        self._facts = facts
        self._lock = threading.Lock()
        self.lineage = facts.lineage
        self.lineages = facts.lineages

    @property
    def facts(self) -> LedgerSnapshot:
        """The facts as they are now."""
        return self._facts

    def hold(
        self,
        k: int,
        group_ids: Iterable[int],
        reused: Iterable[int] = (),
        mask: StaleMask | None = None,
    ) -> None:
        """Note what batch k is about to be sealed with: new groups, reused ones, and the mask."""
        with self._lock:
            self._facts = replace(
                self._facts,
                batches={**self._facts.batches, k: tuple(group_ids)},
                reused={**self._facts.reused, k: tuple(reused)},
                masks={**self._facts.masks, k: mask},
            )

    def advance(self, step: int, results: Mapping[int, Results] | None = None) -> None:
        """Note that batch `step` is trained, and the results of prompts where they have changed."""
        with self._lock:
            facts = self._facts
            self._facts = replace(
                facts, step=step, results=facts.results if results is None else results
            )

    def checkpoint(self, step: int) -> None:
        """Note that the batches up to `step` are inside a durable checkpoint."""
        with self._lock:
            facts = self._facts
            checkpointed = facts.groups_up_to(step)
            self._facts = replace(
                facts,
                checkpoint_step=step,
                checkpointed=checkpointed,
                choices={g: i for g, i in facts.choices.items() if g not in checkpointed},
                batches={k: groups for k, groups in facts.batches.items() if k > step},
                reused={k: groups for k, groups in facts.reused.items() if k > step},
                masks={k: mask for k, mask in facts.masks.items() if k > step},
            )

    def ask_again(self, group_ids: Iterable[int]) -> list[int]:
        """Note groups that are too old, and return the new ones; a second try gets no third."""
        with self._lock:
            facts = self._facts
            settled = {*facts.second_tries, *facts.second_tries.values(), *facts.waiting}
            new = [group for group in group_ids if group not in settled]
            self._facts = replace(facts, waiting=(*facts.waiting, *new))
            return new

    def forget_choices(self, group_ids: Iterable[int]) -> None:
        """Forget what was chosen for dropped groups, except those that wait to be asked again."""
        with self._lock:
            facts = self._facts
            dropped = set(group_ids) - set(facts.waiting)
            kept = {g: item for g, item in facts.choices.items() if g not in dropped}
            self._facts = replace(facts, choices=kept)

    def create(
        self, group_ids: Collection[int], choices: Mapping[int, int] | None = None
    ) -> dict[int, int]:
        """Note groups that are about to be created; the new ones ask the prompts that wait.

        Args:
            group_ids: Ids of the groups.
            choices: Group -> the item that the run's sampler chose; None = it has no sampler.
                A prompt that waits comes first, unless an earlier life had chosen it after its
                last checkpoint: then the sampler may choose it again.

        Returns:
            Dropped group -> the group that asks its prompt now.
        """
        with self._lock:
            facts = self._facts
            # Below the reach an earlier learner created them, to ask something else.
            free = [g for g in group_ids if g >= facts.reach and g not in facts.second_tries]
            ready = [g for g in facts.waiting if choices is None or g in facts.choices]
            assigned = dict(zip(ready, free, strict=False))
            again = {g: facts.choices[old] for old, g in assigned.items() if old in facts.choices}
            chosen = {**(choices or {}), **again, **facts.choices}
            self._facts = replace(
                facts,
                reach=max([facts.reach, *(group + 1 for group in group_ids)]),
                second_tries={**facts.second_tries, **{g: old for old, g in assigned.items()}},
                choices={g: item for g, item in chosen.items() if g not in assigned},
                waiting=tuple(g for g in facts.waiting if g not in assigned),
            )
            return assigned

    def open_round(self, step: int) -> None:
        """Note that the evaluation after `step` waits for answers."""
        with self._lock:
            self._facts = replace(self._facts, open_rounds=self._facts.open_rounds | {step})

    def close_round(self, step: int) -> None:
        """Note that the evaluation no longer waits for answers."""
        with self._lock:
            self._facts = replace(self._facts, open_rounds=self._facts.open_rounds - {step})

    def publish(self, publication: Publication) -> None:
        """Note the newest pointer to weights."""
        with self._lock:
            self._facts = replace(self._facts, publication=publication)


def as_ranges(numbers: Collection[int]) -> list[tuple[int, int]]:
    """Write a set of numbers as ranges [start, end), in order: dense sets become short."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return ranges


def from_ranges(ranges: Iterable[tuple[int, int]]) -> frozenset[int]:
    """Read what `as_ranges` wrote."""
    return frozenset(number for start, end in ranges for number in range(start, end))
