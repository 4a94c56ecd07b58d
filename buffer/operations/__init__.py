"""Operations on the store, as values that `Store` and `AsyncStore` can run.

Users of each (the table of keys is in `keys.py`):

| role    | operations |
| ------- | ---------- |
| anyone  | confirm, begin_run, stats, memory, usage, publication, lineages, actors, brokers, |
|         | read_run_snapshot, closed, inspect, audit |
| broker  | lease, beat, submit, release, fail, cut, share, shrink, suspend, reap, actor_seen, |
|         | broker_seen; of conversations want_agents, take_conversations, add_calls, |
|         | say_replies, read_replies, read_calls, end_conversations, read_news |
| console | dead_letters, dead_letter, requeue_dead, purge_dead, peek, release_dead_actor, |
|         | resume |
| learner | begin_lineage, create, claim, drop, abandon, seal, advance, commit, cancel, publish, |
|         | records, claim_bytes, eval_round, close_eval, reuse, forget_reused, trim_replay, |
|         | clear_replay, references, recreate_dropped, recreations; after a rewind |
|         | restore_lineage, known_tasks, committed_tasks, reconcile, |
|         | restore_committed, check_replay, recovered; write_run_snapshot |

All of the learner's writes carry its lineage, the learner's fence: with a lower one than the run's
they raise LostLineage. Every operation may be sent again when its reply was lost; only
`claim(start=True)` would then count two starts.

batches    The learner's batches, kept units and publication; every write carries the learner's
           lineage
conversations
           Conversations of tasks with live agents: a mailbox of calls and replies beside a task's
           chunks
keys       Keys of a run in Redis: names, types, contents and writers
leases     Leases, partial and finished episodes, and failures: a broker's calls on behalf of actors
operation  Operations as values: calls of Lua scripts and reads, and the value made of their replies
run        A run as a whole: entry, counts, memory, actors and brokers, and recovery after lost
           writes
tasks      Tasks: creation, evaluation and end, for the learner; dead letters and states, for people
values     Arguments and results of the store's operations
"""

from .batches import (
    abandon,
    advance,
    begin_lineage,
    check_replay,
    claim,
    claim_bytes,
    clear_replay,
    commit,
    drop,
    forget_reused,
    new_owner,
    publish,
    records,
    references,
    restore_lineage,
    reuse,
    seal,
    trim_replay,
)
from .conversations import (
    add_calls,
    end_conversations,
    read_calls,
    read_news,
    read_replies,
    say_replies,
    take_conversations,
    want_agents,
)
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
from .run import (
    actors,
    begin_run,
    broker_seen,
    brokers,
    closed,
    confirm,
    lineages,
    memory,
    publication,
    read_run_snapshot,
    reconcile,
    recovered,
    restore_committed,
    resume,
    stats,
    usage,
    write_run_snapshot,
)
from .tasks import (
    audit,
    cancel,
    close_eval,
    committed_tasks,
    create,
    dead_letter,
    dead_letters,
    eval_round,
    inspect,
    known_tasks,
    peek,
    purge_dead,
    recreate_dropped,
    recreations,
    requeue_dead,
)

__all__ = [
    "abandon",
    "actor_seen",
    "actors",
    "add_calls",
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
    "end_conversations",
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
    "read_calls",
    "read_news",
    "read_replies",
    "read_run_snapshot",
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
    "say_replies",
    "seal",
    "share",
    "shrink",
    "stats",
    "submit",
    "suspend",
    "take_conversations",
    "trim_replay",
    "usage",
    "want_agents",
    "write_run_snapshot",
]
