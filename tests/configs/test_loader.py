"""Settings from files and overrides: accepted, refused, and the words of a refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.environments.dataset.rows import open_rows
from configs import user_code
from configs.errors import SettingsError
from configs.hashes import reward_hash
from configs.loader import load, save
from configs.user_python import command_words
from console.main import app


@pytest.fixture
def write(tmp_path):
    def write_file(text: str):
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return path

    return write_file


def refusal(path, *overrides):
    with pytest.raises(SettingsError) as caught:
        load(path, overrides)
    return str(caught.value)


def test_a_file_gives_the_settings_it_names_and_defaults_for_the_rest(write):
    settings = load(write("run: {model: init, steps: 7}\nlearner: {lr: 5e-4}"))

    assert (settings.run.steps, settings.learner.lr) == (7, 5e-4)
    assert settings.actors.count == 1


def test_overrides_win_over_the_file_and_are_read_as_yaml(write):
    path = write("run: {model: init}\nlearner: {lr: 5e-4}")

    settings = load(
        path,
        [
            "learner.lr=1e-6",
            "actors.in_process=true",
            "buffer.url=null",
            "run.environment_settings={dataset: gcd}",
            "run.environment_settings.style=compact",
        ],
    )

    assert settings.learner.lr == 1e-6
    assert settings.actors.in_process is True
    assert settings.run.environment_settings == {"dataset": "gcd", "style": "compact"}


def test_saved_settings_load_as_the_same_settings(write, tmp_path):
    settings = load(write("run: {model: init, environment_settings: {a: [1, 2.5e-7, null]}}"))

    save(settings, tmp_path / "deep" / "config.yaml")

    assert load(tmp_path / "deep" / "config.yaml") == settings
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["config.yaml"]


def test_all_problems_are_listed_with_path_range_and_value(write):
    text = refusal(
        write("run: {steps: true}\nactors: {count: -2}\nalgorithm: {correction: vtrace}"),
        "learner.lr=0",
        "nonsense",
    )

    assert "has 6 problems; nothing was started" in text
    assert "$.run.model must be text, got nothing" in text
    assert "$.run.steps must be a whole number >= 1, got true" in text
    assert "$.actors.count must be a whole number >= 0, got -2" in text
    assert "$.algorithm.correction must be one of none, tis, seq_tis, geo_tis, " in text
    assert 'or path/to/file.py:function, module:function or package/name, got "vtrace"' in text
    assert "$.learner.lr must be a number > 0, got 0; it is: Peak learning rate" in text
    assert "an override must be table.key=value, got 'nonsense'" in text


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("learner.learning_rate", "learner.lr"),
        ("learner.entropy_bonsu", "algorithm.entropy_bonus"),
        ("run.lr", "learner.lr or critic.lr"),
        ("lr", "learner.lr or critic.lr"),
        ("run.num_generations", "run.group_size"),
        ("orchestrator.max_off_policy_steps", "run.max_policy_lag"),
        ("actor_rollout_ref.rollout.n", "run.group_size"),
        ("trainer.policy.model.path", "run.model"),
        ("learner.eps-clip-high", "algorithm.clip_high"),
        ("actor.max_inflight", "actors.max_concurrent_episodes"),
        ("actor.count", "actors.count"),
        ("run.threads", "actors.threads or learner.threads"),
    ],
)
def test_an_unknown_key_gets_the_name_that_was_meant(write, typed, meant):
    text = refusal(write("run: {model: init}"), f"{typed}=1")

    assert f"$.{typed} is not a setting, got 1; did you mean {meant}?" in text


def test_an_unknown_key_that_resembles_nothing_gets_the_names_there_are(write):
    text = refusal(write("run: {model: init}\nconsole: {xyzzy: 1}\nplugh: {q: 2}"))

    assert "$.console.xyzzy is not a setting, got 1; console has refresh_s, alarm_s, " in text
    assert "$.plugh.q is not a setting, got 2; the tables are run, buffer, broker" in text


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (
            ["run.top_p=1"],
            "$.run.top_p has no counterpart: ratios compare the policies' whole dist",
        ),
        (
            ["actors.sampling.top_k=1"],
            "$.actors.sampling.top_k has no counterpart: ratios compare the policies' whole dist",
        ),
        (
            ["run.max_policy_lag=0", "learner.publish_every=2"],
            "$.learner.publish_every must be <= run.max_policy_lag + 1 = 1, got 2",
        ),
        (
            [
                "run.max_prompt_tokens=100",
                "run.max_completion_tokens=50",
                "actors.max_model_len=149",
            ],
            "run.max_prompt_tokens + run.max_completion_tokens = 150, got 149; raise it, or leave",
        ),
        (
            ["actors.heartbeat_s=2", "broker.lease_timeout_s=4"],
            "$.actors.heartbeat_s must be < broker.lease_timeout_s / 2 = 2.0, got 2.0",
        ),
        (
            ["actors.exit_when_told=9"],
            "$.actors.exit_when_told must be 0 or >= 10, got 9; codes between them are those of",
        ),
        (
            ["learner.exit_when_told=1"],
            "$.learner.exit_when_told must be 0 or >= 10, got 1; codes between them are those of",
        ),
        (
            ["actors.in_process=true", "actors.tensor_parallel_size=2"],
            "$.actors.in_process must be null or false with actors.tensor_parallel_size 2, got",
        ),
        (
            ["actors.heartbeat_s=6"],
            "$.actors.heartbeat_s must be < broker.heartbeat_timeout_s = 6.0, got 6.0",
        ),
        (
            ["algorithm.rho_bar=1.28"],
            "$.algorithm.rho_bar must be > 1 + algorithm.clip_high = 1.28, got 1.28",
        ),
        (
            ["algorithm.advantage=pass_at_k", "algorithm.pass_k=8", "run.group_size=8"],
            "$.algorithm.pass_k must be < run.group_size = 8, got 8; with the whole group",
        ),
        (
            ["rewards.overlong_buffer_tokens=51", "run.max_completion_tokens=50"],
            "$.rewards.overlong_buffer_tokens must be <= run.max_completion_tokens = 50, got 51",
        ),
        (
            ["algorithm.filter_zero_variance=true", "algorithm.advantage=reinforce_pp"],
            "$.algorithm.advantage must compare the members of a group, got reinforce_pp",
        ),
        (
            ["algorithm.filter_zero_variance=true", "run.group_size=1"],
            "$.run.group_size must be >= 2 where algorithm.filter_zero_variance is true, got 1",
        ),
        (
            ["run.reward=[a.py:f, b.py:f]"],
            "$.run.reward must name functions of different names, got a.py:f, b.py:f",
        ),
        (
            ["actors.pull_from=[peers]"],
            "actors.pull_from must have publisher, got peers; every version comes from there first",
        ),
        (
            ["learner.broadcast=true", "learner.publisher_endpoint=tcp://0.0.0.0:0"],
            "$.learner.broadcast must be null or false where run.trusted_network is false",
        ),
        (
            ["run.tracing.endpoint=localhost:4318"],
            "$.run.tracing.endpoint must be an address such as http://127.0.0.1:4318, got localho",
        ),
    ],
)
def test_a_refusal_of_settings_names_what_contradicts_and_the_next_step(write, overrides, answer):
    text = refusal(write("run: {model: init}"), *overrides)

    assert answer in text
    assert "has 1 problem;" in text


@pytest.mark.parametrize("secret", ["//ana:secret@host:4318", "//host:4318/?key=secret"])
def test_an_endpoint_with_a_key_is_refused_without_repeating_it(write, secret):
    text = refusal(write("run: {model: init}"), f"run.tracing.endpoint=https:{secret}")

    assert "set OTEL_EXPORTER_OTLP_HEADERS in the environment" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    "overrides",
    [
        ["run.tracing.endpoint=https://collector.example.org/otlp", "run.tracing.share=1"],
        ["run.max_prompt_tokens=100", "run.max_completion_tokens=50", "actors.max_model_len=150"],
        ["actors.heartbeat_s=1.9", "broker.lease_timeout_s=4"],
        ["algorithm.rho_bar=1", "algorithm.correction=none"],
        ["algorithm.rho_bar=1", "algorithm.surrogate=reinforce"],
        ["learner.broadcast=true", "learner.publisher_endpoint=tcp://[::1]:0"],
        [
            "learner.broadcast=true",
            "learner.publisher_endpoint=tcp://0.0.0.0:0",
            "run.trusted_network=true",
        ],
    ],
)
def test_settings_at_the_limit_of_each_other_are_taken(write, overrides):
    load(write("run: {model: init}"), overrides)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "must have a `run:` table with a `model`, got an empty file"),
        ("# nothing but a comment", "got an empty file"),
        ("- a\n- b", "must have tables such as `run:`, got list"),
        ("run: [1", r"must be a YAML file, got: expected ',' or ']'"),
        ("run:\n  model: a\n  model: b", "the key `model` is written twice (line 3)"),
        ("run: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("run: 3", "$.run must be a table of keys, got 3"),
        ("run: {model: init, temperature: .nan}", "$.run.temperature must be a number > 0"),
        ("run: {model: init}\nlearner: {lr: .inf}", "$.learner.lr must be a number > 0"),
    ],
)
def test_a_file_that_is_not_settings_is_refused(write, text, answer):
    assert answer in refusal(write(text))


def test_a_path_without_a_file_is_refused_with_the_place_of_the_presets(tmp_path):
    assert "got a path that does not exist; presets are in" in refusal(tmp_path / "absent.yaml")
    assert "got a directory" in refusal(tmp_path)


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"\xff\xfe\x00run")

    assert "bytes that are not UTF-8" in refusal(path)


def test_only_a_setting_is_named_as_a_path(write):
    path = write("run: {model: init}")

    text = refusal(path, "buffer.maxmemory_mb=16")
    assert "\n  Redis' maxmemory must hold " in text
    assert "$.Redis" not in text
    assert "\n  $.replay.max_lag must be >= learner.checkpoint_every" in refusal(
        path, "replay.capacity=64", "run.group_size=8", "replay.max_lag=1"
    )


NAMES = {
    "run.environment": ("own.py:Own", "environment"),
    "run.environment_python": ("venv/bin/python", "environment_python"),
    "run.model": ("model", "model"),
    "run.reward": ("rewards.py:right", "reward"),
    "run.environment_settings.path": ("rows.jsonl", "path"),
    "run.environment_settings.held_out": ("data/held.jsonl", "held_out"),
    "run.environment_settings.factory": ("own.py:Own", "factory"),
}
"""What names a file of the user -> such a name, and its key."""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The folder in which the command is typed; another than that of the settings."""
    folder = tmp_path / "typed here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = [*user_code.looked_in]
    user_code.looked_in.clear()
    yield folder
    user_code.looked_in[:] = before


def make(folder, name):
    """Make the file that it names, and return the name with its whole path."""
    place, colon, attribute = name.partition(":")
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return f"{path}{colon}{attribute}"


def settings_with(setting, name, *, of_several=False):
    """A run that names a file, in `run` or in an environment of several."""
    run: dict[str, Any] = {"model": "init"}
    table = run
    if of_several and setting != "run.model":
        run["environments"] = [table := {"environment": "calculator"}]
    table["environment"] = "dataset" if "settings" in setting else "calculator"
    _, *above, key = setting.split(".")
    for each in above:
        table = table.setdefault(each, {"path": "rows.jsonl", "prompt": "q"})
    table[key] = name
    return json.dumps({"run": run})


def found(settings, setting, *, of_several=False):
    run = settings.run
    if of_several and setting != "run.model":
        (run,) = settings.run.environments
    key = NAMES[setting][1]
    return run.environment_settings[key] if "settings" in setting else getattr(run, key)


@pytest.mark.parametrize("of_several", [False, True])
@pytest.mark.parametrize("setting", NAMES)
def test_a_file_that_settings_name_lies_beside_them_wherever_the_command_is_typed(
    write, tmp_path, elsewhere, setting, of_several
):
    name, _ = NAMES[setting]
    path = write(settings_with(setting, name, of_several=of_several))
    typed = make(elsewhere, name)

    assert found(load(path), setting, of_several=of_several) == name  # as typed: of this folder
    beside = make(tmp_path, name)
    assert found(load(path), setting, of_several=of_several) == beside != typed
    kept = load(path, finds_files=False)
    assert found(kept, setting, of_several=of_several) == name, "for another machine"


@pytest.mark.parametrize("setting", NAMES)
def test_a_file_typed_with_set_is_of_the_folder_in_which_it_is_typed(
    write, tmp_path, elsewhere, setting
):
    name, _ = NAMES[setting]
    path = write(settings_with(setting, name))
    make(tmp_path, name)
    make(elsewhere, name)

    settings = load(path, [f"{setting}={json.dumps(name)}"])

    assert found(settings, setting) == name
    assert elsewhere.samefile(".")


def test_settings_that_are_read_last_have_the_files_of_a_command(tmp_path, elsewhere):
    run = {"run": {"model": "init"}, "agents": {"command": "python agent.py"}}
    for folder in ("first", "second", "first"):
        agent = Path(make(tmp_path / folder, "agent.py"))
        path = agent.with_name("settings.yaml")
        path.write_text(json.dumps(run))

        words = command_words(load(path).agents)

        assert words == ("python", str(agent)), f"an agent of other settings than {folder}'s"


def test_rows_lie_beside_the_settings_where_their_environment_is_typed(write, tmp_path, elsewhere):
    run = {"model": "init", "environment_settings": {"path": "rows.jsonl", "prompt": "q"}}
    path = write(json.dumps({"run": run}))
    beside = make(tmp_path, "rows.jsonl")
    make(elsewhere, "rows.jsonl")

    typed = load(path, ["run.environment=own.py:Own", "run.environment = dataset"])

    assert typed.run.environment_settings["path"] == beside
    assert load(path).run.environment_settings["path"] == "rows.jsonl", "no dataset's"


def test_a_reference_losses_and_keys_lie_beside_the_settings(write, tmp_path, elsewhere):
    algorithm = {"reference_model": "models/first", "surrogate": "loss.py:f"}
    names = {"algorithm": algorithm, "broker": {"keys": "keys"}}
    path = write(json.dumps({"run": {"model": "init"}, **names}))
    for name in ("models/first", "loss.py:f", "keys"):
        make(elsewhere, name)

    typed = load(path)
    beside = [make(tmp_path, name) for name in ("models/first", "loss.py:f", "keys")]
    settings = load(path)

    assert (typed.algorithm.reference_model, typed.broker.keys) == ("models/first", Path("keys"))
    assert typed.algorithm.surrogate == "loss.py:f"
    found = settings.algorithm.reference_model, settings.algorithm.surrogate, settings.broker.keys
    assert [*map(str, found)] == beside


def test_teachers_lie_beside_the_settings(write, tmp_path, elsewhere):
    teachers = {"sums": "models/first", "words": "owner/name"}
    names = {"teacher": teachers, "teacher_prompt": "hints.py:hint"}
    environments = [{"environment": "calculator", "name": name} for name in teachers]
    run = {"model": "init", "environments": environments}
    path = write(json.dumps({"run": run, "algorithm": names}))
    for name in ("models/first", "hints.py:hint"):
        make(elsewhere, name)
    beside = make(tmp_path, "models/first"), make(tmp_path, "hints.py:hint")

    algorithm = load(path).algorithm

    assert algorithm.teacher == {"sums": beside[0], "words": "owner/name"}
    assert algorithm.teacher_prompt == beside[1]


def test_a_list_of_rewards_and_names_that_are_no_files(write, tmp_path, elsewhere):
    one = make(tmp_path, "rewards.py:one")
    rewards = ["rewards.py:one", "module:two", "other.py:three", "/abs/rewards.py:four"]
    run = {"model": "owner/name", "environment": "calculator", "reward": rewards}
    path = write(json.dumps({"run": run | {"environment_settings": {"path": "rewards.py"}}}))

    settings = load(path)

    assert settings.run.reward == [one, *rewards[1:]]
    assert settings.run.model == "owner/name"
    assert settings.run.environment_settings == {"path": "rewards.py"}, "no dataset's"


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("run.model", "init"),
        ("run.environment", "calculator"),
        ("run.environment", "own:Own"),
        ("run.reward", "own:right"),
        ("run.environment_settings.factory", "own:Own"),
    ],
)
def test_a_name_of_ours_or_of_a_module_is_no_folder_of_that_name(write, tmp_path, setting, name):
    (tmp_path / name).mkdir()

    settings = load(write(settings_with(setting, name)))

    value = settings.model_dump()
    for key in setting.split("."):
        value = value[key]
    assert value == name


def test_a_file_that_is_nowhere_is_refused_with_both_folders(write, tmp_path, elsewhere):
    named = str(load(write(settings_with("run.reward", "rewards.py:right"))).run.reward)
    both = rf"there is no {tmp_path}/rewards\.py and no {elsewhere}/rewards\.py"

    with pytest.raises(SettingsError, match=f"run.reward must be an existing file.*{both}"):
        user_code.load_user_code(named, setting="run.reward", kind="function")
    with pytest.raises(SettingsError, match=f"run.reward must be a readable file.*{both}"):
        reward_hash(named)
    with pytest.raises(SettingsError, match=both.replace(r"rewards\.py", r"rows\.jsonl")):
        open_rows("rows.jsonl")
    make(tmp_path, "rewards.py")  # of the settings; that of --set is not there
    with pytest.raises(
        SettingsError, match=rf"there is no {elsewhere}/rewards\.py: correct the path$"
    ):
        user_code.load_user_code("rewards.py:right", setting="run.reward", kind="function")


def test_a_command_typed_in_another_folder_reads_the_rows_beside_the_settings(
    write, tmp_path, elsewhere
):
    rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"path": "rows.jsonl", "prompt": "question", "answer": "answer", "scorer": "exact"}
    run = {"model": "init", "environment": "dataset", "environment_settings": asked}
    write(json.dumps({"run": run | {"eval_episodes": 2}}))

    done = CliRunner().invoke(app, ["data", "check", "../settings.yaml"])

    assert done.exit_code == 0, done.output
    assert "18" in done.output
    (tmp_path / "rows.jsonl").unlink()
    refused = CliRunner().invoke(app, ["data", "check", "../settings.yaml"])
    assert refused.exit_code == 2
    text = "".join(refused.output.split("\n"))
    assert f"there is no {tmp_path}/rows.jsonl and no {elsewhere}/rows.jsonl" in text
