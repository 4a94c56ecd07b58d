"""Training and evaluation tasks as functions of (run seed, id); rank 0's thread that creates them.

Recovery and the console make the same tasks again; where `run.sampler` chose the prompt of a task
(`sampler.py`), the ledger has the choice. The feeder, which is that thread, keeps new units in the
store so that actors never wait for the step loop. It counts those still alive and creates no more
than the run needs: the next id replaces a unit that was dropped or that failed. CREATE is
idempotent by id, so a resumed feeder simply starts from its checkpointed cursor.

Consumes: the store's counts. Waits for: nothing but its own short pause. Ends when `stop` is called
or a newer learner owns the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from broker.protocol.codec import encode_spec
from broker.protocol.messages import TaskSpec
from buffer import operations
from buffer.operations.keys import EVAL_BASE
from buffer.operations.values import NewTask, Stats
from configs.settings import BufferSettings, RunSettings
from configs.traces import trace_created
from configs.worker import Worker

from .ledger import Ledger
from .retrying_store import RetryingStore
from .sampler import PromptSampler

PAUSE_S = 0.1  # between two readings of the counts; a batch takes longer to make
SEED_BITS = 31  # what every library takes as a seed


def training_task(run: RunSettings, task_id: int) -> TaskSpec:
    """Make the spec of training task `task_id`, which never changes, on any machine.

    All members of a group get the same seed: a group is the episodes of one prompt.
    """
    group_id = task_id // run.group_size
    return TaskSpec(
        group_id=group_id,
        index=group_id,
        seed=_seed(run.seed, "train", group_id),
        purpose="train",
        temperature=run.temperature,
    )


def environment_by_group(run: RunSettings, ledger: Ledger) -> Callable[[int], str]:
    """Return a function that names the environment of a group; a second try has its prompt's."""
    names, mixture = list(run.by_environment), run.mixture

    def name(group_id: int) -> str:
        asked = ledger.facts.second_tries.get(group_id, group_id)
        return names[mixture.training(asked).environment]

    return name


def training_tasks(
    run: RunSettings, group_ids: Iterable[int], asked: Mapping[int, int]
) -> list[NewTask]:
    """Make all tasks of these groups, as CREATE takes them.

    Args:
        run: Settings that specs depend on.
        group_ids: Ids of the groups.
        asked: Group -> the training item whose prompt it asks, where that is not its own number:
            that of a group dropped as too old, or one that `run.sampler` chose.
    """
    size = run.group_size
    tasks = []
    for group_id in group_ids:
        task = training_task(run, asked.get(group_id, group_id) * size)
        spec = encode_spec(replace(task, group_id=group_id))
        ids = range(group_id * size, (group_id + 1) * size)
        tasks += [NewTask(task_id, group_id, spec) for task_id in ids]
    return tasks


def eval_task(run: RunSettings, index: int, task_id: int, *, sampled: bool = False) -> TaskSpec:
    """Make the spec of held-out item `index`; every round asks the same questions."""
    return TaskSpec(
        group_id=task_id,
        index=index,
        seed=_seed(run.seed, "eval", index),
        purpose="eval",
        temperature=run.temperature if sampled else 0.0,
    )


def num_eval_tasks(run: RunSettings) -> int:
    """Count the tasks of a round: each question greedily, then `run.eval_samples` times sampled."""
    return run.mixture.num_questions * (1 + run.eval_samples)


def eval_task_id(run: RunSettings, lineage: int, step: int, number: int) -> int:
    """Number an evaluation task; no number occurs in two rounds or two lineages."""
    round_number = lineage * (run.steps + 1) + step
    return EVAL_BASE + round_number * num_eval_tasks(run) + number


def units_to_create(stats: Stats, *, steps: int, units_per_batch: int, ahead: int) -> int:
    """Compute how many units to create now.

    Args:
        stats: Counts of the store.
        steps: Batches of the whole run.
        units_per_batch: Units that one batch trains on.
        ahead: New units that should be waiting for actors.

    Returns:
        Enough to have `ahead` waiting, but no more than the batches still to be trained can use.
    """
    in_claims = sum(claim.units for claim in stats.claims if claim.k > stats.version)
    alive = stats.new_units + stats.open_units + stats.buffered_units + in_claims
    needed = (steps - stats.version) * units_per_batch - alive
    return max(0, min(ahead - stats.new_units, needed))


class Feeder:
    """Creates training tasks in a thread of its own, on rank 0."""

    def __init__(
        self,
        store: RetryingStore,
        run: RunSettings,
        buffer: BufferSettings,
        *,
        ledger: Ledger,
        cursor: int,
        sampler: PromptSampler | None = None,
    ) -> None:
        self._store = store
        self._sampler = sampler
        self._run = run
        self._ledger = ledger
        # Twice the admission cap, so that an actor finds work even just after a batch was admitted
        # at once.
        self._ahead = 2 * int((run.max_policy_lag + 1) * run.groups_per_batch * buffer.margin) + 1
        if sampler is not None:  # a choice should know the newest results
            self._ahead = int(run.groups_per_batch * buffer.margin) + 1
        self._cursor = cursor
        self._stopping = threading.Event()
        self._worker = Worker(self._work, name="feeder")

    @property
    def cursor(self) -> int:
        """The next group to create; all below it are in the store."""
        return self._cursor

    def start(self) -> None:
        """Start the thread that creates tasks."""
        self._worker.start()

    def check_feed_thread(self) -> None:
        """Raise the error that ended the thread, if any; call it while waiting for its tasks.

        Raises:
            NyalaError: The store refused it or was away for too long.
            Exception: A defect.
        """
        self._worker.raise_if_failed()

    def stop(self) -> None:
        """Stop creating tasks, and wait for the end of the thread, also while Redis is away.

        Its error is raised by `check_feed_thread`.
        """
        self._stopping.set()
        with contextlib.suppress(Exception):
            self._worker.join()

    def _work(self) -> None:
        while not self._stopping.is_set():
            if not self.feed():
                self._stopping.wait(PAUSE_S)

    def feed(self) -> int:
        """Create the missing groups; return their number."""
        run = self._run
        wanted = units_to_create(
            self._store.run(operations.stats()),
            steps=run.steps,
            units_per_batch=run.groups_per_batch,
            ahead=self._ahead,
        )
        if self._sampler is not None and run.deterministic:
            # The groups of a batch are chosen by all batches before it, however fast those are.
            end = (self._ledger.facts.step + 1) * run.groups_per_batch
            wanted = max(0, min(wanted, end - self._cursor))
        if wanted:
            groups = range(self._cursor, self._cursor + wanted)
            # Before they are created: recovery creates again what the store loses at once.
            ledger = self._ledger
            assigned = ledger.create(groups, self._choose(groups))
            self._store.run(operations.recreate_dropped(ledger.lineage, assigned))
            tasks = training_tasks(run, groups, ledger.facts.asked)
            began_ns = time.time_ns()
            created = self._store.run(operations.create(ledger.lineage, tasks))
            # Ids that the store had already count as created: by an earlier learner. They come
            # first.
            new = [task.task_id for task in tasks[len(tasks) - created :]]
            trace_created(new, began_ns=began_ns)
            self._cursor += wanted
        return wanted

    def _choose(self, groups: Iterable[int]) -> dict[int, int] | None:
        """Choose the prompts of groups that have none yet; None = the run has no sampler."""
        if self._sampler is None:
            return None
        facts = self._ledger.facts
        return self._sampler.choose(
            [group for group in groups if group not in facts.choices],
            step=facts.step,
            results=facts.results,
            in_flight=facts.untrained_choices.values(),
        )


def _seed(*parts: int | str) -> int:
    text = ":".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (1 << SEED_BITS)
