"""The `nyala` command as a person types it."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from buffer import operations
from buffer.operations.run import broker_seen
from buffer.operations.values import NewTask
from buffer.store import Store
from configs.loader import json_schema, save
from configs.secrets import write_secret
from configs.settings import RunSettings, Settings
from console.command_line import VERBS
from console.display.display import LiveDisplay
from console.main import app
from console.run.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
SETTINGS_HEAD = "settings that differ from their defaults; `nyala settings` lists all:"
HEAVY = ("torch", "vllm", "transformers", "rich.console", "pydantic", "redis", "zmq")


def nyala(*arguments):
    program = "from console.main import app; app(prog_name='nyala')"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_verb_and_how_to_begin():
    answer = CliRunner().invoke(app, ["--help"]).output

    assert "nyala up configs/demo.yaml" in answer
    for verb in VERBS:
        assert f"\n  {verb} " in answer


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_has_an_example(verb):
    assert f"Example: `nyala {verb}" in CliRunner().invoke(app, [verb, "--help"]).output


@pytest.mark.parametrize("verb", VERBS)
def test_the_line_of_a_verb_begins_its_own_help(verb):
    _usage, first, *_ = CliRunner().invoke(app, [verb, "--help"]).output.split("\n\n")
    _module, line = VERBS[verb]

    assert " ".join(first.split()) == line


BARE_APP = """
import typer
app = typer.Typer(rich_markup_mode=None)
app.command("one")(lambda: None)
app.command("two")(lambda: None)
"""


def modules_of_help(program):
    """The modules that an application has loaded once it has printed its help."""
    program += "\nimport sys\napp(['--help'], standalone_mode=False)\n"
    program += "print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_loads_nothing_heavy_and_little_beyond_typer():
    ours = modules_of_help("from console.main import app")

    assert not ours & set(HEAVY)
    assert len(ours - modules_of_help(BARE_APP)) < 20  # 5 today; the settings alone load 90


@pytest.mark.slow
def test_an_error_is_a_sentence_and_code_2_and_starts_nothing(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(f"run: {{model: init, directory: '{tmp_path}/runs'}}\nlearner: {{lr: -1}}")

    done = nyala("up", path)

    assert done.returncode == 2
    assert done.stderr.startswith(f"nyala: {path} has 1 problem; nothing was started:\n")
    assert "$.learner.lr must be a number > 0, got -1" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_method_by_name_goes_over_the_file_and_under_set(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(
        f"run: {{model: init, environment: calculator, directory: '{tmp_path}/runs'}}\n"
        "actors: {engine: torch}\n"
        "algorithm: {surrogate: clip, clip_high: 0.3, clip_low: 0.3}\n"
    )
    chosen = ("--method", "gspo", "--set", "algorithm.clip_low=0.1")

    done = CliRunner().invoke(app, ["up", str(path), "--dry-run", *chosen])

    lines = done.output.splitlines()
    changed = lines[lines.index(SETTINGS_HEAD) + 1 :]
    assert [each.partition(" (default")[0] for each in changed if "algorithm." in each] == [
        "  algorithm.correction: none",
        "  algorithm.surrogate: gspo",
        "  algorithm.aggregation: sequence",
        "  algorithm.clip_low: 0.1",
        "  algorithm.clip_high: 0.3",
    ]


@pytest.mark.slow
def test_a_method_that_does_not_exist_is_refused_with_those_that_do():
    done = nyala("up", "configs/demo.yaml", "--method", "GPSO")

    assert done.returncode == 2
    assert done.stderr.startswith("nyala: --method must be one of PPO, IMPALA, ")
    assert "got 'GPSO'" in done.stderr


@pytest.mark.slow
def test_a_verb_without_a_config_says_what_is_missing():
    done = nyala("up")

    assert done.returncode == 2
    assert "give one settings file or run folder, as in configs/demo.yaml" in done.stderr


def test_schema_prints_the_schema():
    assert CliRunner().invoke(app, ["schema"]).output == json_schema()


def test_keys_are_made_once(tmp_path):
    first = nyala("keys", tmp_path / "keys")
    secret = (tmp_path / "keys" / "broker.key").read_bytes()
    nyala("keys", tmp_path / "keys")

    assert first.returncode == 0
    assert (tmp_path / "keys" / "broker.key").read_bytes() == secret
    assert (tmp_path / "keys" / "allowed" / "enrolment" / "enrolment.pub").exists()


@pytest.mark.slow
def test_a_role_that_is_started_by_hand_has_the_exit_code_of_the_role(tmp_path):
    settings = Settings(run=RunSettings(model="init", name="r", directory=tmp_path))
    save(settings, tmp_path / "r" / "config.yaml")

    done = nyala("broker", tmp_path / "r")

    # There is no Redis: the broker itself says so, on stderr, in its own log lines.
    assert done.returncode == 2
    assert "buffer.url must be the URL of a Redis server" in json.loads(done.stderr)["event"]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["up", "broker"])
@pytest.mark.parametrize("form", ["buffer.url={}", "buffer={{url: '{}'}}"])
def test_a_password_on_the_command_line_is_refused_and_not_repeated(tmp_path, verb, form):
    path = tmp_path / "settings.yaml"
    path.write_text(f"run: {{model: init, directory: '{tmp_path}/runs'}}")
    override = form.format("redis://:hunter2@127.0.0.1:1/0")

    done = nyala(verb, path, "--set", override)

    assert done.returncode == 2
    assert "buffer.url must have no password on a command line" in done.stderr
    assert "NYALA_REDIS_URL" in done.stderr
    assert "hunter2" not in done.stderr + done.stdout
    assert not (tmp_path / "runs").exists()


def begun(store: Store, *, group_size: int) -> int:
    """Begin a run and the first life of its learner; returns the lineage."""
    call = operations.begin_run(
        "h",
        {},
        units_per_batch=1,
        max_policy_lag=1,
        margin=1.0,
        group_size=group_size,
        min_group_size=group_size,
    )
    store.run(call)
    lineage = store.run(operations.begin_lineage(0, 0))
    assert lineage is not None
    return lineage


def test_status_of_a_running_run_shows_tasks_and_actors(tmp_path, redis_url):
    settings = Settings(run=RunSettings(model="init", name="r", directory=tmp_path))
    folder = settings.run.folder
    save(settings, folder / "config.yaml")
    write_secret(folder / "redis.url", redis_url)
    advice = [{"rule": "groups_flat", "text": "raise\x1b[2J it"}]
    row = {"step": 7, "wall_s": 9, "reward_mean": 0.5, "advice": advice}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with Store(redis_url, run="r") as store:
        lineage = begun(store, group_size=2)
        tasks = [NewTask(task_id, 0, b"spec") for task_id in range(2)]
        store.run(operations.create(lineage, tasks))
        store.run(
            operations.actor_seen(
                {"host-1a2b": {"host": "h", "tokens_per_s": "123", "lost": "0.0"}}
            )
        )
        figures = {"at": time.time(), "actors": 1, "refused_role": 3, "refused_busy": 2}
        store.run(broker_seen("tcp://127.0.0.1:5757", figures))

    answer = CliRunner().invoke(app, ["status", str(folder)])

    assert answer.exit_code == 0
    assert "r: batch 7 of 100, newest checkpoint -" in answer.output
    assert "ADVICE raise\\x1b[2J it\n" in answer.output
    assert "reward 0.500" in answer.output
    assert "actors 1" in answer.output
    assert "2 tasks created: 2 ready" in answer.output
    assert "5757, heard of 0 s ago, 1 actors, refused: 2 busy, 3 role\n" in answer.output
    assert "host-1a2b on h, heard of 0 s ago, version none yet, tokens_per_s 123\n" in answer.output
    assert "ALARM" not in answer.output

    with Store(redis_url, run="r") as store:
        store.run(operations.claim(lineage, 8, 1, start=True))
    answer = CliRunner().invoke(app, ["status", str(folder)])

    assert ": no actor has work (present: 1, tasks ready: 2);" in answer.output
    assert "ALARM for " in answer.output


def test_status_counts_hosts_of_agents_on_all_machines(tmp_path, redis_url):
    settings = Settings(run=RunSettings(model="init", name="r", directory=tmp_path))
    folder = settings.run.folder
    save(settings, folder / "config.yaml")
    write_secret(folder / "redis.url", redis_url)
    with Store(redis_url, run="r") as store:
        lineage = begun(store, group_size=2)
        store.run(operations.create(lineage, [NewTask(task_id, 0, b"spec") for task_id in (0, 1)]))
        leased = store.run(operations.lease("a", ttl_ms=60_000, n=2, version=(lineage, 0))).tasks
        assert "hosts" not in CliRunner().invoke(app, ["status", str(folder)]).output
        store.run(operations.want_agents([(task.task_id, task.fence, b"") for task in leased]))
        for host in ("here", "there"):
            store.run(operations.take_conversations(host, n=1, ttl_ms=60_000))

    answer = CliRunner().invoke(app, ["status", str(folder)])

    assert "\nhosts of agents: 2, with 2 conversations\n" in answer.output


def test_what_is_in_a_store_does_not_steer_the_terminal(tmp_path, redis_url):
    evil = "\x1b[2J\x1b]0;owned\x07 right\u202eleft [bold]"
    settings = Settings(run=RunSettings(model="init", name="r", directory=tmp_path, group_size=1))
    folder = settings.run.folder
    save(settings, folder / "config.yaml")
    write_secret(folder / "redis.url", redis_url)
    with Store(redis_url, run="r") as store:
        lineage = begun(store, group_size=1)
        store.run(operations.create(lineage, [NewTask(0, 0, b"spec")]))
        lease = operations.lease(evil, ttl_ms=60_000, n=1, version=(lineage, 0))
        [task] = store.run(lease).tasks
        failure = (task.task_id, task.fence, "data", evil)
        store.run(operations.fail(max_attempts=1, max_data_failures=1, failures=[failure]))
        store.run(operations.actor_seen({evil: {"host": f"{evil}\nhost", evil: evil}}))

    for words in (["status"], ["buffer", "dead", "list"], ["buffer", "dead", "show"]):
        shown = CliRunner().invoke(app, [*words, str(folder), *(["0"] if "show" in words else [])])

        assert shown.exit_code == 0, shown.output
        assert all(c.isprintable() or c == "\n" for c in shown.output), words
        assert "owned" in shown.output
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=200)
    with LiveDisplay(terminal, name="r") as live:
        live.log(evil)
    assert "\x1b]0" not in written.getvalue()


def test_status_of_a_run_that_was_stopped_says_so(tmp_path):
    settings = Settings(run=RunSettings(model="init", name="r", directory=tmp_path))
    save(settings, tmp_path / "r" / "config.yaml")
    write_secret(tmp_path / "r" / "redis.url", "redis://:x@127.0.0.1:1/0")
    began = time.monotonic()

    answer = CliRunner().invoke(app, ["status", str(tmp_path / "r")])

    assert "not running: stopped since " in answer.output
    assert "Redis cannot be reached" in answer.output, "a server that is not the run's own"
    assert time.monotonic() - began < 10


def test_status_of_a_run_that_is_starting_says_so(tmp_path):
    settings = Settings(run=RunSettings(name="r", directory=tmp_path, model="init"))
    folder = RunFolder(tmp_path / "r")

    with folder.locked():
        checked = CliRunner().invoke(app, ["status", str(folder.path)])
        folder.path.mkdir()
        save(settings, folder.config)
        made = CliRunner().invoke(app, ["status", str(folder.path)])
        folder.init.mkdir()
        starting = CliRunner().invoke(app, ["status", str(folder.path)])
    folder.redis.mkdir()
    stopped = CliRunner().invoke(app, ["status", str(folder.path)])

    assert "still being checked; look again in a moment" in checked.stderr
    assert "starting: the model that it begins with is being made" in made.stdout
    assert "starting or stopping: its store does not answer" in starting.stdout
    assert "not running: " in stopped.stdout
    assert f"to go on from its beginning: `nyala up {folder.path}`" in stopped.stdout
    assert [a.exit_code for a in (checked, made, starting, stopped)] == [2, 0, 0, 0]


def test_status_of_a_finished_run_is_its_summary(tmp_path):
    settings = Settings(run=RunSettings(model="init", name="r", directory=tmp_path))
    save(settings, tmp_path / "r" / "config.yaml")
    summary = {"held_out_accuracy_after": 0.93, "tasks_created": 1600, "something_new": [1]}
    (tmp_path / "r" / "summary.json").write_text(json.dumps(summary))

    answer = CliRunner().invoke(app, ["status", str(tmp_path / "r")])

    assert "r has finished" in answer.output
    assert "0.930" in answer.output
    assert "1,600" in answer.output
    assert "something_new" in answer.output


@pytest.mark.slow
def test_status_of_no_run_is_refused(tmp_path):
    assert "must be the folder of a run" in nyala("status", tmp_path).stderr
    assert "got a path that does not exist" in nyala("status", tmp_path / "absent").stderr
