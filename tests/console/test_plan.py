"""The plan of a run: each actor has a key of its own, and the path of weights is told."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from broker.transport.allow_list import Role, read_allowed, revoke
from broker.transport.keys import HOST, load_pair, make_keys
from configs.errors import SettingsError
from configs.loader import load
from configs.machine import COMPILED
from configs.secrets import VARIABLE
from configs.settings import Settings
from configs.user_code import PACKAGES
from console.run.plan import awaited_agents, commands, environment_of, prepare
from console.run.run_folder import RunFolder
from console.run.user_files import resolve
from console.verbs.up import say_weight_path

REDIS = "redis://127.0.0.1:1/0"  # given, so that none is configured; nobody connects


def settings(tmp_path: Path, *overrides: str) -> Settings:
    path = tmp_path / "settings.yaml"
    path.write_text("run: {name: r, model: init}\nactors: {count: 2, engine: torch}\n")
    return resolve(load(path, [f"run.directory={tmp_path}", *overrides]))


def test_each_actor_has_a_key_of_its_own_that_lasts(tmp_path: Path) -> None:
    plan = settings(tmp_path)
    folder = RunFolder(plan.run.folder)
    prepare(plan, folder, redis_url=REDIS)
    first = {n: load_pair(folder.keys, n) for n in ("actor-0", "actor-1")}  # refuses open files
    allowed = read_allowed(folder.keys)
    actors = [command for command in commands(plan, folder) if command.role == "actor"]

    assert len({pair.public for pair in first.values()}) == 2
    for name, pair in first.items():
        assert (allowed[pair.public].name, allowed[pair.public].role) == (name, Role.ACTOR)
        assert stat.S_IMODE((folder.keys / f"{name}.key").stat().st_mode) == 0o600
    assert [command.arguments[-2:] for command in actors] == [
        ("--key", "actor-0"),
        ("--key", "actor-1"),
    ]
    prepare(plan, folder, redis_url=REDIS)  # as when the run is taken up again
    assert {name: load_pair(folder.keys, name) for name in first} == first

    revoke(folder.keys, "actor-0")
    prepare(plan, folder, redis_url=REDIS)
    assert first["actor-0"].public not in read_allowed(folder.keys)


def test_each_teacher_is_a_process_with_a_key_of_its_own_and_without_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, REDIS)
    alone = settings(tmp_path, "algorithm.teacher=m", "algorithm.teacher_in=actor")
    two = settings(
        tmp_path,
        "algorithm.teacher={sums: m, words: n}",
        "algorithm.teacher_in=actor",
        "actors.teachers=2",
        "run.environments=[{environment: reasoning_gym, name: sums}, {environment: reasoning_gym, "
        "name: words}]",
    )
    for plan, names in ((alone, ["teacher"]), (two, ["sums", "sums", "words", "words"])):
        folder = RunFolder(plan.run.folder)
        prepare(plan, folder, redis_url=REDIS)
        teachers = [each for each in commands(plan, folder) if each.role == "teacher"]

        assert [command.arguments[-2:] for command in teachers] == [
            ("--teacher", name) for name in names
        ]
        allowed = {member.name: member.role for member in read_allowed(folder.keys).values()}
        for number, command in enumerate(teachers):
            assert command.arguments[-4:-2] == ("--key", f"teacher-{number}")
            assert allowed[f"teacher-{number}"] == Role.ACTOR
            assert VARIABLE not in command.environment
    in_learner = settings(tmp_path, "algorithm.teacher=m")
    assert {each.role for each in commands(in_learner, folder)} == {"broker", "learner", "actor"}


def test_keys_of_actors_go_where_keys_were_made(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "mine")
    plan = settings(tmp_path, f"broker.keys={keys}")

    prepare(plan, RunFolder(plan.run.folder), redis_url=REDIS)

    assert {m.name for m in read_allowed(keys).values()} == {"enrolment", "actor-0", "actor-1"}
    (keys / "allowed" / "actor" / "actor-1.pub").unlink()
    (keys / "actor-1.key").unlink()
    (keys / "actor-1.pub").unlink()
    (keys / "actor-1.pub").mkdir()  # what stands for a folder that cannot be written
    (keys / "allowed" / "actor" / "actor-0.pub").unlink()
    (keys / "allowed" / "actor").rmdir()
    (keys / "allowed" / "actor").write_text("")
    with pytest.raises(SettingsError, match=r"broker\.keys must be a folder to which a key"):
        prepare(plan, RunFolder(plan.run.folder), redis_url=REDIS)


def agents_of(tmp_path: Path, *overrides: str) -> Settings:
    (tmp_path / "my_agent.py").write_text("")
    rows = f"{{path: {tmp_path}/rows.jsonl, prompt: task}}"
    return settings(
        tmp_path, "run.environment=agent", f"run.environment_settings={rows}", *overrides
    )


def test_a_command_of_agents_gets_a_host_with_a_key_and_a_log_of_its_own(tmp_path: Path) -> None:
    plan = agents_of(tmp_path, "agents.command=python my_agent.py")
    folder = RunFolder(plan.run.folder)
    prepare(plan, folder, redis_url=REDIS)

    (host,) = (command for command in commands(plan, folder) if command.role == "agents")

    assert host.arguments[-4:] == ("-m", "agents", "--config", str(folder.config))
    assert host.log == folder.log("agents")
    assert VARIABLE not in host.environment
    assert read_allowed(folder.keys)[load_pair(folder.keys, HOST).public].role == Role.HOST
    assert load(folder.config).agents.command == ("python", str(tmp_path / "my_agent.py"))
    assert awaited_agents(plan) is None


def test_without_a_command_agents_are_awaited(tmp_path: Path) -> None:
    plan = agents_of(tmp_path)
    folder = RunFolder(plan.run.folder)
    prepare(plan, folder, redis_url=REDIS)

    assert not any(command.role == "agents" for command in commands(plan, folder))
    assert not (folder.keys / f"{HOST}.key").exists()
    assert f"nyala agents {folder.path} --print" in (awaited_agents(plan) or "")
    assert awaited_agents(settings(tmp_path)) is None


def test_up_tells_which_path_weights_take_and_why(tmp_path: Path) -> None:
    console = Console(record=True, width=200)

    say_weight_path(console, settings(tmp_path))
    say_weight_path(console, settings(tmp_path, "learner.publisher_endpoint=tcp://0.0.0.0:0"))

    near, far = console.export_text().splitlines()
    assert near.startswith("weights to other machines: over process groups, not encrypted")
    assert "pulled over CURVE" in far
    assert "run.trusted_network is false" in far


IMPORT_OURS = f"import {', '.join(PACKAGES)}"


def put_packages_of_our_names(folder: Path) -> None:
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('not ours')\n")


def succeeds(*command: object, folder: Path, **variables: str) -> bool:
    environment = os.environ | variables
    words = [str(word) for word in command]
    ran = subprocess.run(words, check=False, cwd=folder, env=environment, timeout=60)
    return ran.returncode == 0


def test_own_packages_called_as_ours_hide_nothing(tmp_path: Path) -> None:
    put_packages_of_our_names(tmp_path)
    plan = settings(tmp_path)

    begins = {c.arguments[: c.arguments.index("-m")] for c in commands(plan, RunFolder(tmp_path))}

    assert len(begins) == 1
    assert succeeds(*begins.pop(), "-c", IMPORT_OURS, folder=tmp_path)


def test_neither_do_those_that_pythonpath_names(tmp_path: Path) -> None:
    put_packages_of_our_names(tmp_path)
    python = (sys.executable, "-P", "-c")
    given = {"PYTHONPATH": str(tmp_path)}
    role = environment_of("broker", settings(tmp_path), inherited=given)

    assert not succeeds(*python, IMPORT_OURS, folder=tmp_path, **given)
    assert succeeds(*python, IMPORT_OURS, folder=tmp_path, PYTHONPATH=role["PYTHONPATH"])

    shutil.rmtree(tmp_path / "console")  # `nyala` begins with ours, which puts the others right
    nyala = Path(sys.executable).with_name("nyala")
    assert succeeds(nyala, "--help", folder=tmp_path, **given)


@pytest.mark.parametrize("role", ["actor", "learner"])
def test_compiled_code_is_kept_among_the_users_caches(
    tmp_path: Path, monkeypatch, role: str
) -> None:
    def places(**given: str) -> dict[str, str]:
        variables = environment_of(role, settings(tmp_path), inherited=given)
        return {name: variables[name] for name in COMPILED if name in variables}

    assert set(places()) == {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    assert places()["TRITON_CACHE_DIR"] == str(Path.home() / ".cache/nyala/compile/triton")
    assert places(XDG_CACHE_HOME="/kept")["VLLM_CACHE_ROOT"] == "/kept/nyala/compile/vllm"
    own = places(TORCHINDUCTOR_CACHE_DIR="/own", XDG_CACHE_HOME="/kept")
    assert own["TORCHINDUCTOR_CACHE_DIR"] == "/own"
    assert own["TRITON_CACHE_DIR"] == "/kept/nyala/compile/triton"

    monkeypatch.setattr(os, "access", lambda *_: False)  # a home folder that is read-only
    assert places(TRITON_CACHE_DIR="/own") == {"TRITON_CACHE_DIR": "/own"}


def test_broker_and_redis_compile_nothing(tmp_path: Path) -> None:
    for role in ("broker", "redis"):
        assert not COMPILED.keys() & environment_of(role, settings(tmp_path), inherited={})


def test_files_of_each_environment_become_absolute(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("")
    own = "{environment: 'env.py:Guess', reward: ['a.py:f', 'm:g']}"
    data = "{environment: dataset, environment_settings: {path: a.jsonl}}"

    found, rows = settings(tmp_path, f"run.environments=[{own}, {data}]").run.environments

    assert rows.environment_settings == {"path": f"{tmp_path}/a.jsonl"}
    assert rows.reward is None
    assert found.environment == f"{tmp_path}/env.py:Guess"
    assert found.reward == [f"{tmp_path}/a.py:f", "m:g"]


def test_files_of_the_users_code_become_absolute(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = settings(tmp_path, "run.environment=env.py:Env", "run.reward=rewards.py:f").run
    assert (run.environment, run.reward) == (f"{tmp_path}/env.py:Env", f"{tmp_path}/rewards.py:f")
    assert settings(tmp_path, "run.environment=env:Env").run.environment == "env:Env"


@pytest.mark.parametrize(
    ("endpoint", "further"),
    [
        ("http://127.0.0.1:9480", ["http://127.0.0.1:9481"]),
        ("http://[::1]:9480", ["http://[::1]:9481"]),
        ("http://127.0.0.1:0", ["http://127.0.0.1:0"]),
        (None, []),
    ],
)
def test_each_actor_of_a_machine_has_a_page_of_metrics_of_its_own(
    tmp_path: Path, endpoint: str | None, further: list[str]
) -> None:
    changes = [f"actors.metrics_endpoint={endpoint}"] if endpoint else []
    plan = settings(tmp_path, *changes)
    first, second = (
        [word for word in each.arguments if word.startswith("actors.metrics_endpoint=")]
        for each in commands(plan, RunFolder(plan.run.folder))
        if each.role == "actor"
    )

    assert first == []  # as the run's settings say
    assert second == [f"actors.metrics_endpoint={each}" for each in further]


def test_pages_of_metrics_are_found_in_the_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "broker-9470.json").write_text('[{"targets": ["127.0.0.1:9470"]}]')

    pages = RunFolder(tmp_path).metrics_pages()

    assert pages == {"broker-9470": "http://127.0.0.1:9470/metrics"}
