r"""Keys of a run in Redis: names, types, contents and writers.

The prefix is `nyala:{run}`, so runs can share a server. Scripts get the prefix and build the
rest (`lua/lib/keys.lua`).

    key             type    holds                                           written by
    meta            hash    state, lineage, version, committed, ...  begin_*, lease, advance
                            gen, seen: run_ids, confirmed and newest          confirm, recovered
    lineages        hash    lineage -> step it forked at                    begin_lineage
    known           bitmap  every training task ever created                create
    new             zset    unit that is not begun -> id        create, lease, requeue_dead
    open            set     unit with a leased member, not complete         lease, submit
    g:<unit>        set     its members that are neither done nor dead      lease, submit
    s:<unit>        list    its members' specs while it is new  create, lease, requeue_dead
    t:<task>        hash    of a begun unit: st, spec, fence, inc, key, ... all
    t:<task>:p      list    chunks of its unfinished completion             beat, say_replies
    m:<task>        hash    its conversation: ticket, calls, bytes, ...     want_agents, ...
    m:<task>:c      list    calls of its agent, `<parent> <keep>\n<tail>`   add_calls
    m:<task>:r      zset    `<number>\n<reply>` -> stamp, Redis us          say_replies
    wanted          zset    task that waits for a host -> since, Redis ms   want_agents, reap
    tickets         zset    task -> when its host's ticket expires  take_conversations, read_replies
    news            zset    task -> number of its conversation's last change    as m:<task>
    h:<tag>:<incarnation>   hash    a host: its newest ticket, silent agents  take_conversations
    e:<task>        string  its record; of a committed task if its unit is kept  submit
    in:<i>          string  a record on its way, gone when the call ends    submit
    ready           zset    task of an open unit -> -1 if resumed, else id  lease, release, reap
    lease           zset    task -> deadline, Redis ms                      lease, beat
    teachers        set     names of teachers that were named               submit
    unscored:<name> zset    finished task that waits for its score -> as ready  submit, reap
    lease:score     zset    as lease, finished tasks at their teachers      lease, beat
    done            set     task submitted and not claimed                  submit, claim
    buf             zset    complete unit -> order of arrival               submit, claim
    claims          zset    batch k                                         claim, commit
    c:<k>           zset    unit of batch k -> order of arrival             claim, drop, commit
    c:<k>:s         hash    sealed, starts, keep:<unit>            claim, seal, advance, abandon
    claimed         set     task of a claim                                 claim, drop, commit
    replay          zset    kept unit -> its place in the order of sampling commit, reuse
    replay:age      zset    the same units -> batches its policy had seen   commit, reuse
    reused          zset    kept unit in a batch again -> k                 reuse, commit
    x:<unit>        hash    its tasks, their bytes, uses, ...               commit
    dead            zset    dead letter -> ms; all it has stays   fail, reap, beat, abandon
    deaths          zset    recent dead letter -> units complete by then    as dead
    l:<tag>:<incarnation>   hash    its last granted LEASE: seq, fence, deadline    lease
    holders         zset    tag of a holder -> last lease, Redis ms         lease
    suspended       hash    tag of a key or holder -> end, times, why       suspend, resume
    purged          bitmap  all that is left of a purged dead letter        purge_dead
    committed       bitmap  all that is left of a committed task            commit
    cancelled       bitmap  all that is left of a cancelled task            cancel
    dropped:<why>   bitmap  all that is left of a dropped task              drop
    reasons         set     each <why> that has a bitmap                    drop
    again           hash    unit dropped as too old -> the one that repeats it  recreate_dropped
    rounds          zset    open evaluation round <lineage>:<step>          create, close_eval
    v:<round>       hash    evaluation task -> record                       submit
    v:<round>:r     zset    its ready tasks                                 create, lease
    v:<round>:u     set     its unfinished tasks                            create, submit
    v:<round>:x     set     its failed tasks                                fail, reap
    lease:eval      zset    as lease, evaluation tasks                      lease, beat
    publication     hash    where the current weights are                   publish
    actors          zset    incarnation, tag -> last seen, Redis ms         actor_seen
    a:<actor>       hash    its figures                                     actor_seen
    brokers         hash    address -> its figures, JSON                    broker_seen

A training task is in exactly one of `new` (through its unit), `ready`, `lease`, `unscored:<name>`,
`lease:score`, `done`, `claimed`, `dead` or a bitmap of ended tasks; their sum is the number of
created tasks. A task has a mailbox only while it is ready or leased. The only counters are
those of arrivals, and of failures for a diagnosis (`data_failures`).
There is no watermark below which all tasks are committed: a bitmap of ten million tasks is 1.2 MB,
exact, and needs no upkeep.
"""

from __future__ import annotations

EVAL_BASE = 2**48
"""Evaluation tasks have ids from here on; training tasks below."""

MAX_TRAINING_TASKS = 2**32
"""Bits that a Redis bitmap can hold."""


def run_prefix(run: str) -> str:
    """Return the prefix of all keys of a run."""
    return f"nyala:{{{run}}}"


def record_key(task_id: int) -> str:
    """Return the key of a training task's record, without the prefix."""
    return f":e:{task_id}"


def incoming_key(i: int) -> str:
    """Return the key of the i-th record of a call, without the prefix."""
    return f":in:{i}"
