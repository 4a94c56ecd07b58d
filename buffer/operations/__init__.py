"""Operations on the store, as values that `Store` and `AsyncStore` can run.

Users of each (the table of keys is in `keys.py`):

| role    | operations |
| ------- | ---------- |
| anyone  | confirm, begin_run, stats, memory, usage, publication, lineages, actors, brokers, |
|         | shown, closed, inspect, audit |
| broker  | lease, beat, submit, release, fail, cut, share, shrink, suspend, reap, actor_seen, |
|         | broker_seen |
| console | dead_letters, dead_letter, requeue_dead, purge_dead, peek, release_dead_actor, |
|         | resume |
| learner | begin_lineage, create, claim, drop, abandon, seal, advance, commit, cancel, publish, |
|         | records, claim_bytes, eval_round, close_eval, reuse, forget_reused, trim_replay, |
|         | clear_replay, references, recreate_dropped, recreations; after a rewind |
|         | restore_lineage, known_tasks, committed_tasks, reconcile, |
|         | restore_committed, check_replay, recovered; show |

All of the learner's writes carry its lineage, the learner's fence: with a lower one than the run's
they raise LostLineage. Every operation may be sent again when its reply was lost; only
`claim(start=True)` would then count two starts.
"""

from .audit import audit, inspect
from .batches import (
    abandon,
    advance,
    begin_lineage,
    claim,
    claim_bytes,
    commit,
    drop,
    new_owner,
    publish,
    records,
    references,
    restore_lineage,
    seal,
)
from .dead_letters import dead_letter, dead_letters, peek, purge_dead, requeue_dead
from .leases import (
    actor_seen,
    beat,
    cut,
    fail,
    lease,
    reap,
    release,
    release_dead_actor,
    share,
    shrink,
    submit,
    suspend,
)
from .recovery import confirm, reconcile, recovered, restore_committed
from .replay import check_replay, clear_replay, forget_reused, reuse, trim_replay
from .run import (
    actors,
    begin_run,
    broker_seen,
    brokers,
    closed,
    lineages,
    memory,
    publication,
    resume,
    show,
    shown,
    stats,
    usage,
)
from .tasks import (
    cancel,
    close_eval,
    committed_tasks,
    create,
    eval_round,
    known_tasks,
    recreate_dropped,
    recreations,
)

__all__ = [
    "abandon",
    "actor_seen",
    "actors",
    "advance",
    "audit",
    "beat",
    "begin_lineage",
    "begin_run",
    "broker_seen",
    "brokers",
    "cancel",
    "check_replay",
    "claim",
    "claim_bytes",
    "clear_replay",
    "close_eval",
    "closed",
    "commit",
    "committed_tasks",
    "confirm",
    "create",
    "cut",
    "dead_letter",
    "dead_letters",
    "drop",
    "eval_round",
    "fail",
    "forget_reused",
    "inspect",
    "known_tasks",
    "lease",
    "lineages",
    "memory",
    "new_owner",
    "peek",
    "publication",
    "publish",
    "purge_dead",
    "reap",
    "reconcile",
    "records",
    "recovered",
    "recreate_dropped",
    "recreations",
    "references",
    "release",
    "release_dead_actor",
    "requeue_dead",
    "restore_committed",
    "restore_lineage",
    "resume",
    "reuse",
    "seal",
    "share",
    "show",
    "shown",
    "shrink",
    "stats",
    "submit",
    "suspend",
    "trim_replay",
    "usage",
]
