"""What may happen next in a history against the model, each with how often, in parts.

What is rare in a run, and what only somebody broken or hostile does, is about as frequent as the
rest.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.buffer.support.model import actor_moves, learner_moves, store_moves, talk_moves
from tests.buffer.support.model.both import Modelled

MOVES: dict[Callable[[Modelled], object], float] = {
    store_moves.pass_time: 8,
    store_moves.jump: 2,
    learner_moves.create: 4,
    actor_moves.lease: 8,
    actor_moves.teach: 6,
    actor_moves.beat: 8,
    actor_moves.pad: 1,
    actor_moves.undeliverable: 1,
    actor_moves.shrink: 1,
    actor_moves.suspend: 1,
    actor_moves.share: 1,
    store_moves.reopen: 1,
    actor_moves.submit: 3,
    actor_moves.submit_unit: 4,
    actor_moves.release: 2,
    actor_moves.fail: 3,
    actor_moves.reap: 4,
    actor_moves.actor_dies: 3,
    learner_moves.train: 10,
    learner_moves.claim: 1,
    learner_moves.advance: 2,
    learner_moves.commit: 2,
    learner_moves.abandon: 2,
    learner_moves.drop: 2,
    learner_moves.publish: 2,
    learner_moves.write_run_snapshot: 1,
    learner_moves.reuse: 2,
    learner_moves.trim: 1,
    learner_moves.check_replay: 1,
    learner_moves.take_over: 2,
    learner_moves.restore_lineage: 1,
    learner_moves.evaluate: 3,
    learner_moves.close_eval: 2,
    store_moves.requeue: 3,
    store_moves.purge: 2,
    store_moves.end: 0.5,
    learner_moves.recreate: 1,
    store_moves.save: 2,
    store_moves.lose_writes: 2,
    store_moves.recover: 1,
    actor_moves.actors_seen: 1,
    talk_moves.want: 3,
    talk_moves.take: 3,
    talk_moves.call: 6,
    talk_moves.say: 6,
    talk_moves.hear: 3,
    talk_moves.listen: 3,
    talk_moves.end: 2,
    talk_moves.end_and_fail: 0.5,
    talk_moves.news: 1,
    talk_moves.talk_a_while: 4,
    talk_moves.fall_silent: 0.5,
    store_moves.look: 4,
}
