"""Every operation on the store, as a value that `Store` and `AsyncStore` can run.

Who uses which (the table of keys is in `keys.py`):

| role    | operations |
| ------- | ---------- |
| anyone  | begin_run, stats, memory, publication, lineages, actors |
| broker  | lease, beat, submit, release, fail, reap, actor_seen |
| learner | begin_lineage, create, claim, drop, abandon, seal, advance, commit, cancel, publish, |
|         | records, eval_round, close_eval |

All of the learner's writes carry its lineage, the learner's fence: with a lower one than the run's
they raise LostLineage. Every operation may be sent again when its reply was lost; only
`claim(start=True)` would then count two starts.
"""

from .batches import (
    abandon,
    advance,
    begin_lineage,
    claim,
    commit,
    drop,
    publish,
    records,
    seal,
)
from .leases import actor_seen, beat, fail, lease, reap, release, submit
from .run import actors, begin_run, lineages, memory, publication, stats
from .tasks import cancel, close_eval, create, eval_round

__all__ = [
    "abandon",
    "actor_seen",
    "actors",
    "advance",
    "beat",
    "begin_lineage",
    "begin_run",
    "cancel",
    "claim",
    "close_eval",
    "commit",
    "create",
    "drop",
    "eval_round",
    "fail",
    "lease",
    "lineages",
    "memory",
    "publication",
    "publish",
    "reap",
    "records",
    "release",
    "seal",
    "stats",
    "submit",
]
