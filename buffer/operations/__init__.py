"""Every operation on the store, as a value that `Store` and `AsyncStore` can run.

Who uses which (the table of keys is in `keys.py`):

| role    | operations |
| ------- | ---------- |
| anyone  | confirm, begin_run, stats, memory, publication, lineages, actors, look, audit |
| broker  | lease, beat, submit, release, fail, reap, actor_seen |
| console | dead_letters, dead_letter, requeue_dead, purge_dead, peek, bereave |
| learner | begin_lineage, create, claim, drop, abandon, seal, advance, commit, cancel, publish, |
|         | records, claim_bytes, eval_round, close_eval, reuse, forget_reused, trim_replay, |
|         | clear_replay, references, ask_again, asked_again; after a rewind |
|         | restore_lineage, known_tasks, committed_tasks, reconcile, |
|         | restore_committed, check_replay, recovered |

All of the learner's writes carry its lineage, the learner's fence: with a lower one than the run's
they raise LostLineage. Every operation may be sent again when its reply was lost; only
`claim(start=True)` would then count two starts.
"""

from .audit import audit, look
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
from .deaths import bereave
from .leases import actor_seen, beat, fail, lease, reap, release, submit
from .recovery import confirm, reconcile, recovered, restore_committed
from .replay import check_replay, clear_replay, forget_reused, reuse, trim_replay
from .run import actors, begin_run, lineages, memory, publication, stats
from .tasks import (
    ask_again,
    asked_again,
    cancel,
    close_eval,
    committed_tasks,
    create,
    eval_round,
    known_tasks,
)

__all__ = [
    "abandon",
    "actor_seen",
    "actors",
    "advance",
    "ask_again",
    "asked_again",
    "audit",
    "beat",
    "begin_lineage",
    "begin_run",
    "bereave",
    "cancel",
    "check_replay",
    "claim",
    "claim_bytes",
    "clear_replay",
    "close_eval",
    "commit",
    "committed_tasks",
    "confirm",
    "create",
    "dead_letter",
    "dead_letters",
    "drop",
    "eval_round",
    "fail",
    "forget_reused",
    "known_tasks",
    "lease",
    "lineages",
    "look",
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
    "references",
    "release",
    "requeue_dead",
    "restore_committed",
    "restore_lineage",
    "reuse",
    "seal",
    "stats",
    "submit",
    "trim_replay",
]
