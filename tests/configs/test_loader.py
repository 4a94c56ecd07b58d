"""Settings from files and overrides: accepted, refused, and the words of a refusal."""

import pytest

from configs.errors import SettingsError
from configs.loader import load, save


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
            ["actors.pull_from=[peers, store]"],
            "must have publisher, or store and a learner.weight_store, got peers, store; nobody",
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
        ["actors.pull_from=[peers, store]", "learner.weight_store=file:///weights"],
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
