"""What this learner knows better than a store that lost writes, and puts right there.

    held (its batch is about to be sealed) -> trained -> checkpointed (inside a durable checkpoint)

Invariant: a group that weights contain, or soon will, is in exactly one of these. Written by the
loop and the feeder, read by whichever thread notices a rewind; writers keep the store's calm
(`retrying_store.py`) where two facts must change together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from broker.protocol.messages import Publication


@dataclass(slots=True)
class Ledger:
    """The facts of one life of the learner, on rank 0."""

    lineage: int
    owner: str
    """Of the take-over that began this lineage."""
    lineages: Mapping[int, int]
    """lineage -> step it forked at, this one included."""
    step: int
    """Batches trained."""
    checkpoint_step: int
    """Batches inside the newest durable checkpoint."""
    checkpointed: set[int]
    """Groups of the batches inside it."""
    reach: int = 0
    """Groups below it were created, or are being created now."""
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Groups of the batches since then: k -> trained, or k = step + 1, held."""
    reused: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Groups that those batches train again."""
    second_tries: dict[int, int] = field(default_factory=dict)
    """Group -> the dropped group whose prompt it asks again."""
    waiting: deque[int] = field(default_factory=deque)
    """Dropped groups whose prompts are to be asked again. The store has both, for the next life."""
    open_rounds: set[int] = field(default_factory=set)
    """Evaluation rounds of this lineage, by step, that wait for answers."""
    publication: Publication | None = None
    """The last that this life put into the store."""

    def hold(self, k: int, group_ids: Iterable[int], reused: Iterable[int] = ()) -> None:
        """Note what batch k is about to be sealed with: new groups, and those trained before."""
        self.batches[k] = tuple(group_ids)
        self.reused[k] = tuple(reused)

    def ask_again(self, group_ids: Iterable[int]) -> list[int]:
        """Note groups that are too old; a second try gets no third. Returns those that are new."""
        known = {*self.second_tries, *self.second_tries.values(), *self.waiting}
        new = [group for group in group_ids if group not in known]
        self.waiting.extend(new)
        return new

    def assign_second_tries(self, group_ids: Iterable[int]) -> dict[int, int]:
        """Have groups that are about to be created ask what waits.

        Returns:
            Dropped group -> the group that asks its prompt now.
        """
        assigned = {}
        for group in group_ids:
            # Below its reach an earlier life has created it, to ask something else.
            if self.waiting and group >= self.reach and group not in self.second_tries:
                self.second_tries[group] = self.waiting.popleft()
                assigned[self.second_tries[group]] = group
        return assigned

    @property
    def asked_again(self) -> dict[int, int | None]:
        """What the store is to know: dropped group -> second try; None = it waits for one."""
        waiting: dict[int, int | None] = dict.fromkeys(self.waiting)
        return waiting | {dropped: group for group, dropped in self.second_tries.items()}

    def checkpoint(self, step: int) -> None:
        """Note that the batches up to `step` are inside a durable checkpoint."""
        for k in [k for k in self.batches if k <= step]:
            self.checkpointed.update(self.batches.pop(k))
            self.reused.pop(k, None)
        self.checkpoint_step = step

    def groups_up_to(self, step: int) -> set[int]:
        """Collect the groups of all batches up to `step`."""
        recent = (groups for k, groups in self.batches.items() if k <= step)
        return self.checkpointed.union(*recent)


def as_ranges(numbers: Collection[int]) -> list[tuple[int, int]]:
    """Write a set of numbers as ranges [start, end), in order: dense sets become short."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return ranges


def from_ranges(ranges: Iterable[tuple[int, int]]) -> set[int]:
    """Read what `as_ranges` wrote."""
    return {number for start, end in ranges for number in range(start, end)}
