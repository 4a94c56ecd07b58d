"""The keys of a run in Redis: names in one place, and who writes them.

The prefix is `nyala:{run}`; the braces make one hash tag of it, so all keys of a run live on one node and
several runs can share a server. Scripts get the prefix and build the rest (`lua/keys.lua`).

| key                | type   | holds                                                     | written by |
| ------------------ | ------ | --------------------------------------------------------- | ---------- |
| `meta`             | hash   | state, lineage, version, committed, fence, caps, hashes   | BEGIN_*, LEASE, ADVANCE, COMMIT, CANCEL |
| `lineages`         | hash   | lineage -> step it forked at                              | BEGIN_LINEAGE |
| `known`            | bitmap | every training task ever created                          | CREATE |
| `new`              | zset   | unit nobody has begun -> id                               | CREATE, LEASE |
| `open`             | set    | unit with a leased member, not complete                   | LEASE, SUBMIT |
| `g:<unit>`         | set    | its members that are neither done nor dead                | LEASE, SUBMIT |
| `t:<task>`         | hash   | st, spec, fence, inc, len, att, lastlen, why, round       | all |
| `t:<task>:p`       | list   | chunks of its unfinished completion                       | BEAT |
| `e:<task>`         | string | its record                                                | SUBMIT |
| `ready`            | zset   | task of an open unit -> -1 if resumed, else id            | LEASE, RELEASE, REAP, FAIL |
| `lease`            | zset   | task -> deadline, Redis ms                                | LEASE, BEAT |
| `done`             | set    | submitted, not claimed                                    | SUBMIT, CLAIM |
| `buf`              | zset   | complete unit -> order of arrival                         | SUBMIT, CLAIM |
| `claims`           | zset   | batch k                                                   | CLAIM, COMMIT |
| `c:<k>`            | zset   | unit of batch k -> order of arrival                       | CLAIM, DROP, COMMIT |
| `c:<k>:s`          | hash   | sealed, starts                                            | CLAIM, SEAL |
| `claimed`          | set    | task of a claim                                           | CLAIM, DROP, COMMIT |
| `dead`             | zset   | dead task -> ms; its hash and chunks stay                 | FAIL, REAP |
| `committed`, `cancelled`, `dropped:<reason>` | bitmap | all that is left of such tasks  | COMMIT, CANCEL, DROP |
| `reasons`          | set    | reasons that have a bitmap                                | DROP |
| `rounds`           | zset   | open evaluation round `<lineage>:<step>`                  | CREATE, CLOSE |
| `v:<round>`        | hash   | evaluation task -> record                                 | SUBMIT |
| `v:<round>:r`, `:u`, `:x` | zset, set, set | its ready, unfinished, failed tasks        | CREATE, LEASE, SUBMIT, FAIL |
| `lease:eval`       | zset   | as `lease`, evaluation tasks                              | LEASE, BEAT |
| `publication`      | hash   | where the current weights are                             | PUBLISH |
| `actors`, `a:<incarnation>` | zset, hash | last seen, figures                           | ACTOR_SEEN |

A training task is in exactly one of: `new` (through its unit), `ready`, `lease`, `done`, `claimed`, `dead`,
or one of the bitmaps; created = the sum of them. A counter exists only for the order of arrival.
"""

from __future__ import annotations

EVAL_BASE = 2**48
"""Evaluation tasks have ids from here on; training tasks below."""

MAX_TRAINING_TASKS = 2**32
"""Bits that a Redis bitmap can hold."""


def run_prefix(run: str) -> str:
    """Name the prefix of all keys of a run."""
    return f"nyala:{{{run}}}"
