"""Random histories against a real Redis, and mutants that they must catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from buffer.scripts import LoadScript, Script, load_script, make_script
from tests.buffer.history import History

STEPS = 500
CHECK_EVERY = 20


@contextmanager
def _history(url: str, seed: int, scripts: LoadScript = load_script) -> Iterator[History]:
    history = History(url, seed, scripts)
    try:
        yield history
    finally:
        history.close()


def _play(history: History) -> None:
    for step in range(STEPS):
        history.step()
        if step % CHECK_EVERY == 0:
            history.check()
    history.finish(batches=4)


@pytest.mark.parametrize("seed", range(8))
def test_no_history_loses_repeats_or_mixes_episodes(redis_url: str, seed: int) -> None:
    with _history(redis_url, seed) as history:
        _play(history)

        assert history.learner.lineage > 1 or history.learner.step > 6


UNSEAL = """
for _, gid in ipairs(sealed == 1 and call('ZRANGE', claim, 0, -1) or {}) do
  call('ZREM', claim, gid)
  call('ZADD', BUF, call('HINCRBY', META, 'arrivals', 1), gid)
  for _, id in ipairs(members(gid, size)) do call('SMOVE', CLAIMED, DONE, id) end
end
sealed = 0
"""

# What is broken: the script, the text in it, what takes its place, and what must notice.
MUTANTS = {
    "no fence check": ("submit", "if task[2] ~= fence then return 'STALE' end", "", "I9"),
    "no offset check": ("beat", "tokens > 0 and offset == length", "tokens > 0", "I3"),
    "claim not sticky": (
        "claim",
        "call('ZADD', CLAIMS, k, k)",
        UNSEAL + "call('ZADD', CLAIMS, k, k)",
        "I7",
    ),
    "reap forgets removal": ("reap", "call('ZREM', lease_key(id), id)", "", "I1"),
    "admission forgets batches in training": (
        "lease",
        "units = units + call('ZCARD', claim_key(k))",
        "",
        "I14",
    ),
    "no learner fence": (
        "claim",
        "if tonumber(lineage) < tonumber(current) then",
        "if false then",
        "an old learner was heard",
    ),
    "a drop forgets the tasks": ("drop", "drop_unit(ARGV[i], size, ARGV[3])", "0", "I2"),
    "a commit forgets the tasks": ("commit", "forget(id, COMMITTED)", "", "I2"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_script_is_caught(redis_url: str, mutant: str) -> None:
    where, old, new, invariant = MUTANTS[mutant]
    assert old in load_script(where).source

    def broken(name: str) -> Script:
        return make_script(load_script(name).source.replace(old, new))

    def hunt() -> None:
        for seed in range(20):
            with _history(redis_url, seed, broken) as history:
                _play(history)

    with pytest.raises(AssertionError, match=invariant):
        hunt()
