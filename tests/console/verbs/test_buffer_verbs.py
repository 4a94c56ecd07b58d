"""`nyala buffer` on a run in a real store."""

import io
import json
from dataclasses import replace

import pytest
import redis
from rich.console import Console
from typer.testing import CliRunner

from actors.engine.character_tokenizer import make_tokenizer
from broker.protocol.codec import encode_spec
from broker.protocol.messages import TaskSpec
from buffer import operations
from buffer.operations.values import BeatLine, NewTask, Rating, SubmitLine
from buffer.record.codec import encode_completion, encode_episode
from buffer.record.episode import Branch
from buffer.store import Store
from configs.loader import save
from configs.secrets import write_secret
from configs.settings import RunSettings, Settings
from console.main import app
from console.verbs.status import print_status
from tests.buffer.support.episodes import example_episode

SPEC = TaskSpec(group_id=0, index=7, seed=1, purpose="train", temperature=1.0)


@pytest.fixture
def folder(tmp_path, redis_url):
    """A run with one unit that waits, a poisonous unit, and a task that failed with two tokens."""
    settings = Settings(run=RunSettings(model="init", name="r", directory=tmp_path))
    save(settings, settings.run.folder / "config.yaml")
    write_secret(settings.run.folder / "redis.url", redis_url)
    with Store(redis_url, run="r") as store:
        call = operations.begin_run(
            "h",
            {},
            units_per_batch=2,
            max_policy_lag=1,
            margin=1.0,
            group_size=2,
            min_group_size=1,
        )
        store.run(call)
        lineage = store.run(operations.begin_lineage(0, 0))
        assert lineage is not None
        spec = encode_spec(SPEC)
        store.run(operations.create(lineage, [NewTask(i, i // 2, spec) for i in range(6)]))
        tasks = store.run(operations.lease("host-1", ttl_ms=60_000, n=6, version=(1, 0))).tasks
        records = [
            encode_episode(replace(example_episode(), task_id=i, group_id=i // 2)) for i in range(6)
        ]
        rows = [SubmitLine(task.task_id, task.fence, records[task.task_id]) for task in tasks[:4]]
        store.run(operations.submit(rows[:2]))
        store.run(operations.claim(lineage, 1, 1))
        store.run(operations.abandon(lineage, 1, "poison", to_dead_letters=True))
        store.run(operations.submit(rows[2:]))
        branched = replace(example_episode(tokens=2).completion, branches=(Branch(1, 0),))
        chunk = encode_completion(branched)
        line = BeatLine(tasks[4].task_id, tasks[4].fence, 0, 2, chunk)
        store.run(operations.beat(ttl_ms=60_000, lines=[line]))
        failure = (tasks[4].task_id, tasks[4].fence, "data", "reward raised [red]KeyError")
        store.run(operations.fail(max_attempts=3, max_data_failures=1, failures=[failure]))
    return settings.run.folder


def ask(*arguments):
    answer = CliRunner().invoke(app, ["buffer", *map(str, arguments)])
    assert answer.exit_code == 0, answer.output
    return answer.output


def ask_json(*arguments):
    return json.loads(ask(*arguments, "--json"))


def test_stats_count_tasks_by_place(folder):
    shown = ask("stats", folder)

    assert "RUNNING, lineage 1, 0 batches trained, 0 committed; 6 tasks created" in shown
    assert "dead" in shown
    stats = ask_json("stats", folder)
    assert (stats["dead"], stats["buffered"], stats["leased"]) == (3, 2, 1)
    assert stats["memory"]["limit_bytes"] == 512 * 2**20


def test_stats_say_how_many_groups_are_kept_for_reuse(folder, redis_url):
    assert "kept for reuse" not in ask("stats", folder)

    with Store(redis_url, run="r") as store:
        store.run(operations.claim(1, 1, 1))
        store.run(operations.seal(1, 1, [Rating(1, 1, 0, 0.0)]))
        store.run(operations.advance(1, 1))
        store.run(operations.commit(1, 1))
        store.run(operations.reuse(1, 2, 1, sampling="newest", numbers=[0.5]))

    shown = " ".join(ask("stats", folder).split())
    assert "1 groups kept for reuse, 1 in a batch" in shown


def test_peek_shows_what_the_records_say(folder):
    (unit,) = ask_json("peek", folder)

    assert (unit["group"], unit["tokens"], unit["rewards"]) == (1, [4, 4], [0.25, 0.25])
    assert unit["policy versions"] == ["1.2"]
    assert "1 complete units wait" in ask("peek", folder)


def test_peek_shows_texts_and_takes_nothing(folder):
    tokenizer = make_tokenizer([])
    tokenizer.save_pretrained(folder / "init")
    prompt = tokenizer.decode(example_episode().prompt_ids.tolist())

    for _ in range(2):
        lines = [json.loads(each) for each in ask("peek", folder, "--texts", "--json").splitlines()]
        assert [(line["group"], line["task"], line["reward"]) for line in lines] == [
            (1, 2, 0.25),
            (1, 3, 0.25),
        ]
        assert {line["prompt"] for line in lines} == {prompt}
        assert [sum(turn["tokens"] for turn in line["turns"]) for line in lines] == [4, 4]
    shown = ask("peek", folder, "--texts")
    assert "2 episodes of the oldest units that wait for a batch" in shown
    assert "group 1 waits, task 2, reward 0.25" in shown
    assert ask_json("stats", folder)["buffered"] == 2


def test_dead_letters_are_listed_with_their_reason_as_text(folder):
    shown = ask("dead", "list", folder)

    assert "3 dead letters, 0 more were purged" in shown
    assert "reward raised [red]KeyError" in shown
    assert [row["why"] for row in ask_json("dead", "list", folder)].count("poison") == 2


def test_a_dead_letter_is_shown_with_all_that_it_keeps(folder):
    failed, poisonous = ask_json("dead", "show", folder, 4), ask_json("dead", "show", folder, 0)

    assert (failed["tokens"], failed["token_ids"], failed["last holder"]) == (2, [0, 1], "host-1")
    assert failed["branches"] == [[1, 0]] and "branches" not in poisonous
    assert failed["spec index"] == 7
    assert (poisonous["reward"], poisonous["metadata answer"]) == (0.25, "cba")
    assert "poison" in ask("dead", "show", folder, 0)


def test_dead_letters_are_requeued_and_purged_by_id_or_all_at_once(folder):
    assert ask_json("dead", "requeue", folder, 4, 99) == [
        {"task": 4, "verdict": "READY"},
        {"task": 99, "verdict": "GONE"},
    ]
    assert "2 of 2 purged" in ask("dead", "purge", folder, "--all")
    assert ask_json("dead", "list", folder) == []
    assert ask_json("stats", folder)["dead"] == 2


def test_a_dead_letter_whose_prompt_is_lost_does_not_count_as_requeued(folder, redis_url):
    with redis.Redis.from_url(redis_url) as server:
        tasks = [key for key in server.scan_iter("*:t:*") if key.endswith((b":0", b":1"))]
        assert all(server.hdel(key, "spec") for key in tasks)

    assert "0 of 1 requeued" in ask("dead", "requeue", folder, 0)
    assert ask_json("dead", "requeue", folder, 0) == [{"task": 0, "verdict": "FORGOTTEN"}]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("dead", "requeue"), "must be named by their ids or by --all, got neither"),
        (("dead", "purge", "4", "--all"), "got both"),
        (("dead", "show", "5"), "task must be a dead letter, got 5"),
    ],
)
def test_a_wrong_request_says_what_to_do(folder, arguments, text):
    first, *rest = arguments
    verb, *others = rest
    answer = CliRunner().invoke(app, ["buffer", first, verb, str(folder), *others])

    assert answer.exit_code == 2
    assert text in answer.output


@pytest.mark.parametrize("verb", ["stats", "peek", "dead list", "dead show", "dead requeue"])
def test_help_of_every_verb_has_an_example(verb):
    shown = CliRunner().invoke(app, ["buffer", *verb.split(), "--help"]).output

    assert f"Example: `nyala buffer {verb} runs/demo" in shown


def test_status_names_what_is_closed_and_resume_opens_it(folder, redis_url):
    with Store(redis_url, run="r") as store, redis.Redis.from_url(redis_url) as client:
        client.hset("nyala:{r}:meta", "paused", "11 of the last 1000 tasks died")
        store.run(operations.suspend("abc", "it failed"))
    screen = io.StringIO()
    print_status(folder, Console(file=screen, width=200))

    shown = screen.getvalue()
    assert "leasing is paused: 11 of the last 1000 tasks died" in shown
    assert "the key abc gets no leases for" in shown
    assert f"nyala buffer resume {folder}" in shown
    assert "it failed" in ask("resume", folder)
    assert "nothing was closed" in ask("resume", folder)


def test_status_is_one_object_for_programs(folder, redis_url):
    with Store(redis_url, run="r") as store:
        store.run(operations.suspend("abc", "it failed"))

    def status():
        return json.loads(CliRunner().invoke(app, ["status", str(folder), "--json"]).stdout)

    found = status()
    assert (found["run"], found["state"], found["is_up"]) == ("r", "unfinished", False)
    assert (found["progress"]["step"], found["progress"]["steps"]) == (0, 100)
    assert (found["store"]["tasks"]["created"], found["store"]["tasks"]["dead"]) == (6, 3)
    assert found["store"]["memory"]["limit_bytes"] == 512 * 2**20
    assert found["store"]["suspended_keys"]["abc"]["why"] == "it failed"

    (folder / "redis.url").unlink()
    (folder / "summary.json").write_text('{"steps": 9}')
    found = status()
    assert (found["state"], found["store"], found["summary"]) == ("finished", None, {"steps": 9})
