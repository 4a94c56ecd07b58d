"""The access rules that are shipped: each role can do its work, and nothing that rules a server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from buffer import operations
from buffer.admin import forget_run
from buffer.operations.keys import EVAL_BASE
from buffer.operations.run import broker_seen, brokers
from buffer.operations.values import (
    BeatLine,
    CallLine,
    EndLine,
    LeasedTask,
    ListenLine,
    NewTask,
    ReplyLine,
    SayLine,
    SubmitLine,
)
from buffer.store import Store
from configs.errors import StoreError
from tests.buffer.support.servers import server
from tests.waiting import wait_until

RULES = Path(__file__).parents[2] / "configs" / "deploy" / "redis-users.acl"
ROLES = ("broker", "learner", "console")


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server under the shipped rules, for two runs; a role's password is its name."""
    shipped = RULES.read_text(encoding="utf-8")
    for role in ROLES:
        digest = hashlib.sha256(role.encode()).hexdigest()
        shipped = shipped.replace(f"{role.upper()}_PASSWORD_SHA256", digest)
    nobody, users = shipped.split("\n", 1)
    rules = nobody + "\n" + users.replace("RUN", "run") + users.replace("RUN", "run2")
    file = tmp_path_factory.mktemp("rules") / "users.acl"
    file.write_text(rules)
    settings = f'save ""\naclfile "{file}"\n'
    with server(tmp_path_factory.mktemp("server") / "redis", settings) as (_, port):
        client = redis.Redis(port=port, username="run-broker", password="broker")
        wait_until(lambda: bool(client.ping()), ignoring=redis.RedisError)
        client.close()
        yield port


@pytest.fixture
def stores(port: int) -> Iterator[dict[str, Store]]:
    """A client of the run for each role."""
    stores = {role: Store(_url(role, port), "run") for role in ROLES}
    yield stores
    forget_run(_url("console", port), "run")
    for store in stores.values():
        store.close()


def _url(role: str, port: int) -> str:
    return f"redis://run-{role}:{role}@127.0.0.1:{port}/0"


def _begin(learner: Store) -> int:
    learner.run(
        operations.begin_run(
            "c",
            {},
            units_per_batch=2,
            max_policy_lag=9,
            margin=1.0,
            group_size=2,
            min_group_size=2,
        )
    )
    owner = operations.new_owner()
    lineage = learner.run(operations.begin_lineage(0, 0, owner=owner))
    assert lineage == 1
    learner.run(operations.restore_lineage(1, 0, owner=owner, lineages={1: 0}))
    learner.run(operations.create(1, [NewTask(i, i // 2, b"spec") for i in range(30)]))
    learner.run(operations.create(1, [NewTask(EVAL_BASE + i, i, b"", 0) for i in range(4)]))
    learner.run(operations.publish(1, 0, {"digest": "d"}))
    return lineage


def _act(broker: Store) -> None:
    """All that a broker does for actors, up to the death of a unit and of an evaluation."""
    tasks = broker.run(operations.lease("a", ttl_ms=60_000, n=24, version=(1, 0))).tasks
    lines = [BeatLine(task.task_id, task.fence, 0, 1, b"x") for task in tasks]
    broker.run(operations.beat(ttl_ms=60_000, lines=lines * 300))
    rows = [SubmitLine(task.task_id, task.fence, b"record") for task in tasks]
    broker.run(operations.submit([*rows[:1], *rows[4:16]]))
    broker.run(operations.release([row[:2] for row in rows[18:20]]))
    failures = [(*row[:2], "data", "bad") for row in (rows[1], rows[2], rows[16], rows[20])]
    broker.run(operations.fail(max_attempts=1, max_data_failures=1, failures=failures))
    broker.run(operations.lease("a", ttl_ms=-1, n=2, version=(1, 0)))
    broker.run(operations.reap(max_attempts=1))
    broker.run(operations.actor_seen({"a": {"x": "1"}}))
    broker.run(broker_seen("tcp://x", {"y": 1.0}))
    (task,) = broker.run(operations.lease("b", ttl_ms=60_000, n=1, version=(1, 0), key="k")).tasks
    _converse(broker, task)
    broker.run(operations.cut([(task.task_id, task.fence)], max_attempts=2))
    broker.run(operations.shrink(1))
    broker.run(operations.share("other", 1, 1, still_ms=0, token_ms=1))
    broker.run(operations.suspend("k", "why"))
    broker.run(operations.closed())
    for look in (operations.stats(), operations.memory(), operations.publication()):
        broker.run(look)
    assert broker.run(brokers()) is not None and broker.run(operations.actors()) is not None
    assert broker.run(operations.usage())
    assert broker.run(operations.read_run_snapshot()) is None


def _converse(broker: Store, task: LeasedTask) -> None:
    """All that a broker does for a live agent, its host and its actor."""
    broker.run(operations.want_agents([(task.task_id, task.fence, b"")], "k"))
    (taken,) = broker.run(operations.take_conversations("h", n=1, ttl_ms=60_000)).tickets
    ticket = taken.ticket
    broker.run(operations.add_calls([CallLine(task.task_id, ticket, 1, 0, 0, b"body")]))
    assert broker.run(operations.read_calls([ListenLine(task.task_id, task.fence)], "k"))[0].calls
    said = SayLine(BeatLine(task.task_id, task.fence, 0, 1, b"x", "k"), ticket, 1, 1, b"reply")
    broker.run(operations.say_replies([said, said], ttl_ms=60_000))
    line = ReplyLine(task.task_id, ticket)
    (answer,) = broker.run(operations.read_replies([line], ttl_ms=60_000, agent_ms=60_000))
    assert len(answer.replies) == 1
    broker.run(operations.end_conversations([EndLine(task.task_id, ticket, why="ended")]))
    assert broker.run(operations.read_news(0)).tasks


def _learn(learner: Store) -> None:
    """All that a learner does, up to a recovery and the end."""
    claim = learner.run(operations.claim(1, 1, 4, start=True))
    learner.run(operations.records(claim.units[0].task_ids))
    learner.run(operations.recreate_dropped(1, {claim.units[0].group_id: None}))
    assert learner.run(operations.recreations())
    learner.run(operations.drop(1, 1, [claim.units[0].group_id], "stale"))
    learner.run(operations.seal(1, 1))
    learner.run(operations.abandon(1, 1, "poison", to_dead_letters=True))
    learner.run(operations.claim(1, 1, 1))
    learner.run(operations.seal(1, 1))
    learner.run(operations.confirm("f" * 40))
    learner.run(operations.reconcile(1, 1, [3, 13]))
    learner.run(operations.restore_committed(1, [4, 14]))
    learner.run(operations.advance(1, 1))
    learner.run(operations.write_run_snapshot(1, b"{}"))
    assert learner.run(operations.read_run_snapshot()) == b"{}"
    assert learner.run(operations.claim_bytes(1))
    assert learner.run(operations.usage()) and learner.run(brokers()) is not None
    learner.run(operations.commit(1, 1))
    learner.run(operations.recovered(1, "f" * 40))
    for look in (operations.known_tasks(), operations.committed_tasks(), operations.lineages()):
        learner.run(look)
    learner.run(operations.eval_round(1, 0, [EVAL_BASE]))
    learner.run(operations.close_eval(1, 0))
    learner.run(operations.closed())


def test_every_role_can_do_its_work_under_the_shipped_rules(stores: dict[str, Store]) -> None:
    _begin(stores["learner"])
    _act(stores["broker"])
    console = stores["console"]
    assert console.run(operations.usage())
    _learn(stores["learner"])
    console.ping()
    letters = console.run(operations.dead_letters())
    assert len(letters) > 4
    for letter in letters:
        console.run(operations.dead_letter(letter.task_id))
    console.run(operations.purge_dead([letters[0].task_id]))
    verdicts = console.run(operations.requeue_dead([letter.task_id for letter in letters]))
    assert {"ANEW", "GONE"} <= set(verdicts)
    for look in (operations.peek(9), operations.actors(), brokers()):
        console.run(look)
    console.run(operations.release_dead_actor("a", "", max_attempts=1))
    for watch in (operations.inspect(), operations.audit(), operations.memory()):
        console.run(watch)
    assert "k" in console.run(operations.closed()).keys
    assert console.run(operations.resume())
    stats = console.run(operations.stats())
    assert stats.accounted == stats.created
    stores["learner"].run(operations.cancel(1))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "command",
    [
        ("CONFIG", "GET", "*"),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("SHUTDOWN",),
        ("REPLICAOF", "NO", "ONE"),
        ("MONITOR",),
        ("ACL", "LIST"),
        ("HSET", "someone-elses", "a", "b"),
        ("EVAL", "return redis.call('KEYS', '*')", "0"),
        ("EVAL", "return redis.call('HSET', 'someone-elses', 'a', 'b')", "0"),
    ],
    ids=" ".join,
)
def test_no_role_rules_the_server_or_touches_foreign_keys(
    port: int, role: str, command: tuple[str, ...]
) -> None:
    with (
        redis.Redis(port=port, username=f"run-{role}", password=role) as client,
        pytest.raises(redis.ResponseError, match=r"permission|can't (run|access)"),
    ):
        client.execute_command(*command)


def test_a_broker_cannot_read_finished_episodes(port: int) -> None:
    with (
        redis.Redis(port=port, username="run-broker", password="broker") as client,
        pytest.raises(redis.ResponseError, match="permission"),
    ):
        client.get("nyala:{run}:e:1")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("own", "other"), [("run", "run2"), ("run2", "run")])
def test_a_user_of_one_run_reads_and_writes_nothing_of_another(
    port: int, role: str, own: str, other: str
) -> None:
    url = f"redis://{own}-{role}:{role}@127.0.0.1:{port}/0"
    with Store(url, other) as store, pytest.raises(StoreError, match="access rules refuse"):
        store.run(operations.stats())
    with redis.Redis.from_url(url) as client:
        client.hget(f"nyala:{{{own}}}:meta", "batch")
        for command in (("HGET", "meta", "batch"), ("HSET", "meta", "batch", "1")):
            name, key, *rest = command
            with pytest.raises(redis.ResponseError, match="permission"):
                client.execute_command(name, f"nyala:{{{other}}}:{key}", *rest)


def test_a_refusal_by_the_rules_says_so(port: int) -> None:
    with (
        Store(_url("broker", port), "run") as store,
        pytest.raises(StoreError, match="access rules refuse this user"),
    ):
        store.run(operations.records([1]))


def test_nobody_gets_in_without_a_role(port: int) -> None:
    with (
        Store(f"redis://127.0.0.1:{port}/0", "run") as store,
        pytest.raises(StoreError, match="refused the password"),
    ):
        store.ping()


def test_the_rules_do_not_load_before_the_passwords_are_set(tmp_path: Path) -> None:
    settings = f'aclfile "{RULES}"\n'
    with server(tmp_path / "redis", settings) as (process, _):
        assert process.wait(20) != 0
