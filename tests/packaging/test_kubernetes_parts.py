"""The recipes for Kubernetes with a Redis of the user's: brokers, and a learner of several nodes.

As `test_kubernetes.py`, which has what every pod needs.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from broker.transport.allow_list import Role, read_allowed
from broker.transport.keys import load_pair, load_public
from configs.errors import SettingsError
from configs.loader import load
from configs.settings import Settings
from console.verbs.fleet import render
from learner.launch import check_nodes
from tests.packaging.support.kubernetes_changes import (
    Change,
    container,
    mounted,
    moved,
    replaced,
    volume,
    without,
    without_mount,
    without_volume,
)
from tests.packaging.support.kubernetes_problems import problems
from tests.packaging.support.kubernetes_recipes import Recipes, given, rendered

BROKER, LEARNER, ACTOR = "nyala-broker", "nyala-learner", "nyala-actor"
BROKERS, JOB = ("Deployment", BROKER), ("Job", LEARNER)
URL = "redis://:secret@redis.data:6379/0"


def settings(nodes: int = 2, changes: Mapping[str, object] | None = None) -> Settings:
    run = {"name": "far", "model": "Qwen/Qwen3-0.6B", "environment": "calculator"}
    tree = {
        "run": {**run, "trusted_network": nodes > 1},
        "buffer": {"url": URL},
        "fleet": {"learner_nodes": nodes},
        "learner": {"ranks": 8},
    }
    return Settings.model_validate(tree | dict(changes or {}))


@pytest.fixture
def recipes(tmp_path: Path) -> Recipes:
    return rendered(tmp_path / "out", settings())


def policy(recipes: Recipes, name: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = recipes.documents["NetworkPolicy", name]["spec"]["ingress"]
    return found


def service(recipes: Recipes, name: str) -> dict[str, object]:
    found: dict[str, object] = recipes.documents["Service", name]["spec"]
    return found


def claim(recipes: Recipes, name: str) -> dict[str, object]:
    found: dict[str, object] = recipes.documents["PersistentVolumeClaim", name]["spec"]
    return found


def writable_list(recipes: Recipes) -> None:
    (mount,) = [m for m in container(recipes, LEARNER)["volumeMounts"] if m["name"] == "allowed"]
    del mount["readOnly"]


def without_variable(name: str, variable: str) -> Change:
    def change(recipes: Recipes) -> None:
        own = container(recipes, name)
        own["env"] = [each for each in own["env"] if each["name"] != variable]

    return change


MUTANTS: list[tuple[str, Change]] = [
    ("nyala-broker: one broker", lambda r: r.documents[BROKERS]["spec"].update(replicas=1)),
    ("nyala-broker: both", lambda r: r.documents.pop(("PodDisruptionBudget", BROKER))),
    ("nyala-broker: it has no address", without_variable(BROKER, "POD_IP")),
    ("nyala-broker: it has no way to Redis", without_variable(BROKER, "NYALA_REDIS_URL_FILE")),
    ("nyala-learner: it has no way to Redis", without_variable(LEARNER, "NYALA_REDIS_URL_FILE")),
    ("nyala-learner: it has no way to Redis", without_volume(LEARNER, "redis")),
    (
        "nyala-actor: it has a way to Redis",
        lambda r: volume(r, ACTOR, "keys")["secret"].update(secretName="nyala-redis"),
    ),
    ("nyala-broker: brokers and publisher", without_mount(BROKER, "/srv/nyala/keys/allowed")),
    (
        "nyala-broker: brokers and publisher",
        lambda r: volume(r, BROKER, "allowed").update(
            persistentVolumeClaim={"claimName": "nyala-runs"}
        ),
    ),
    (
        "nyala-broker: one node alone",
        lambda r: claim(r, "nyala-allowed").update(accessModes=["ReadWriteOnce"]),
    ),
    ("nyala-broker: the learner could let", writable_list),
    ("nyala-broker: keys are not readable", lambda r: r.pod(BROKER)["securityContext"].clear()),
    ("nyala-broker: the probe asks", lambda r: container(r, BROKER).pop("readinessProbe")),
    ("nyala-broker: it is process 1", lambda r: r.pod(BROKER).pop("shareProcessNamespace")),
    ("nyala-broker: /tmp is not writable", without_mount(BROKER, "/tmp")),
    (
        "nyala-broker: there is no file redis.url",
        lambda r: (r.folder / "redis.url").unlink(),
    ),
    ("broker.endpoint: nobody listens", replaced(ACTOR, "nyala-broker", "nyala-hub")),
    ("broker.advertise: nobody listens", replaced(BROKER, "$(POD_IP)", "nyala-broker")),
    ("broker.endpoint: the way", lambda r: policy(r, BROKER).pop(0)),
    ("the Service has an address", lambda r: service(r, BROKER).pop("clusterIP")),
    ("the Service selects no pod", lambda r: service(r, LEARNER).update(selector={"app": "x"})),
    ("learner.advertise: nobody listens", without(LEARNER, "--set=learner.advertise")),
    ("learner.advertise: nobody", replaced(LEARNER, "nyala-learner-0.nyala", "nyala-1.nyala")),
    ("learner.advertise: the way", lambda r: policy(r, LEARNER).pop(0)),
    ("nyala-learner: its ranks do not", lambda r: policy(r, LEARNER).pop(1)),
    ("nyala-learner: its pods have no", lambda r: r.documents[JOB]["spec"].pop("completionMode")),
    ("nyala-learner: its nodes are not", lambda r: r.documents[JOB]["spec"].update(completions=3)),
    ("nyala-learner: its nodes are not", lambda r: r.documents[JOB]["spec"].pop("parallelism")),
    ("nyala-learner: its nodes are not", replaced(LEARNER, "--nodes=2", "--nodes=1")),
    ("nyala-learner: its nodes do not know", replaced(LEARNER, "$(JOB_COMPLETION_INDEX)", "0")),
    ("nyala-learner: its nodes do not meet", replaced(LEARNER, "rendezvous=nyala", "rendezvous=x")),
    ("nyala-learner: pod 0 has no name", lambda r: r.pod(LEARNER).pop("subdomain")),
    (
        "nyala-learner: pod 0 has no name",
        lambda r: service(r, LEARNER).pop("publishNotReadyAddresses"),
    ),
    (
        "nyala-learner: its nodes do not share",
        lambda r: claim(r, "nyala-runs").update(accessModes=["ReadWriteOnce"]),
    ),
    ("nyala-learner: the Job would", without(LEARNER, "--set=learner.exit_when_told")),
    (
        "nyala-learner: /dev/shm is no",
        lambda r: volume(r, LEARNER, "shared-memory")["emptyDir"].clear(),
    ),
    (
        "KEDA asks pods",
        lambda r: r.documents["ScaledObject", ACTOR]["spec"]["triggers"][0]["metadata"].update(
            query='max(nyala_actors_wanted{pod=~"nyala-hub-.*"})'
        ),
    ),
    (
        "Prometheus does not find",
        lambda r: r.documents["PodMonitor", "nyala"]["spec"]["selector"]["matchExpressions"][
            0
        ].update(values=["nyala-hub", "nyala-actor"]),
    ),
]


@pytest.mark.parametrize("nodes", [1, 2])
def test_nothing_is_wrong_with_the_files(tmp_path: Path, nodes: int) -> None:
    assert problems(rendered(tmp_path / "out", settings(nodes))) == []


@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_each_mistake_in_such_files_is_found(recipes: Recipes, number: int) -> None:
    answer, change = MUTANTS[number]
    change(recipes)

    found = problems(recipes)

    assert [text for text in found if text.startswith(answer)], found


def test_only_the_secret_has_the_password(recipes: Recipes) -> None:
    files = [path for path in recipes.folder.iterdir() if path.is_file()]

    assert [path.name for path in files if "secret@" in path.read_text()] == ["redis.url"]
    assert (recipes.folder / "redis.url").stat().st_mode & 0o777 == 0o600
    assert (recipes.folder / "redis.url").read_text() == f"{URL}\n"


@pytest.mark.parametrize("name", [BROKER, LEARNER])
def test_the_settings_that_a_container_changes_are_taken(recipes: Recipes, name: str) -> None:
    changes = {k: v for k, v in given(container(recipes, name)).items() if not k.startswith("--")}

    taken = load(recipes.folder / "config.yaml", [f"{k}={v}" for k, v in changes.items()])

    assert str(taken.broker.keys) == "/srv/nyala/keys"


def test_the_launchers_take_what_the_nodes_are_given(recipes: Recipes) -> None:
    run = load(recipes.folder / "config.yaml", []).run
    (rendezvous,) = [
        word.partition("=")[2]
        for word in container(recipes, LEARNER)["command"]
        if word.startswith("--rendezvous=")
    ]

    for node in range(2):
        assert check_nodes(run, 2, node, rendezvous) == ("nyala-learner-0.nyala-learner", 29400)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"buffer": {"url": "redis://localhost:6379/0"}}, "buffer.url must be a Redis that pods"),
        ({"buffer": {"url": "unix:///run/redis.sock"}}, "buffer.url must be a Redis that pods"),
        ({"buffer": {}}, "learner_nodes must be 1 unless buffer.url and run.trusted_network"),
        ({"run": {"model": "m"}}, "learner_nodes must be 1 unless buffer.url and run.trust"),
    ],
)
def test_what_several_nodes_cannot_have_is_refused(
    tmp_path: Path, changes: dict[str, dict[str, object]], problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem):
        render(settings(changes=changes), "kubernetes", tmp_path)


def test_other_schedulers_start_no_nodes(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"learner_nodes must be 1 on Slurm, got 2; start the"):
        render(settings(), "slurm", tmp_path)


def begin(recipes: Recipes, tmp_path: Path, name: str, *, pod: str) -> Path:
    """Run the init container of one pod; its folder of keys, in which `allowed` is shared."""
    (init,) = recipes.pod(name)["initContainers"]
    own = tmp_path / pod
    own.mkdir(exist_ok=True)
    allowed = own / "allowed"
    if not allowed.exists():
        allowed.symlink_to(tmp_path / "shared")
    if not (tmp_path / name).exists():
        mounted(tmp_path, recipes, name)
    places = {"/run/nyala/keys": tmp_path / name, "/srv/nyala/keys": own}
    (tmp_path / f"bin-{pod}").mkdir(exist_ok=True)
    hostname = tmp_path / f"bin-{pod}" / "hostname"
    hostname.write_text(f"#!/bin/sh\necho {pod}\n")
    hostname.chmod(0o755)
    path = f"{hostname.parent}:{os.environ['PATH']}"
    subprocess.run(
        moved(init["command"], places), check=True, timeout=60, env=os.environ | {"PATH": path}
    )
    return own


def test_brokers_that_start_at_once_begin_one_list_which_the_learner_reads(
    recipes: Recipes, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    mounted(tmp_path, recipes, BROKER)
    with ThreadPoolExecutor() as pool:
        started = [
            pool.submit(begin, recipes, tmp_path, BROKER, pod=f"broker-{number}")
            for number in range(6)
        ]
    folders = [each.result() for each in started]
    learner = begin(recipes, tmp_path, LEARNER, pod="learner-0")

    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["enrolment"]
    enrolment = load_public(recipes.folder / "keys", "enrolment")
    for folder in (*folders, learner):
        assert {key: each.role for key, each in read_allowed(folder).items()} == {
            enrolment: Role.ENROLMENT
        }
    assert load_pair(folders[0], "broker") == load_pair(recipes.folder / "keys", "broker")
    assert load_pair(learner, "learner") == load_pair(recipes.folder / "keys", "learner")
    assert not (learner / "broker.key").exists()


def test_a_broker_that_comes_later_lets_no_revoked_key_in(recipes: Recipes, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    first = begin(recipes, tmp_path, BROKER, pod="broker-1")
    (first / "allowed" / "enrolment" / "enrolment.pub").unlink()  # as a revocation does

    begin(recipes, tmp_path, BROKER, pod="broker-1")  # its sandbox was made anew
    later = begin(recipes, tmp_path, BROKER, pod="broker-2")

    assert read_allowed(later) == {}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_containers_command_serves(recipes: Recipes, tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "shared").mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text((recipes.folder / "config.yaml").read_text())
    (tmp_path / "redis.url").write_text(f"{redis_url}\n")
    places = {
        "/srv/nyala/keys": begin(recipes, tmp_path, BROKER, pod="broker-1"),
        "/run/nyala/run": run,
        "/run/nyala/redis": tmp_path,
        "/tmp": tmp_path / "tmp",
    }
    nyala, *arguments = moved(container(recipes, BROKER)["command"], places)
    assert nyala == "nyala"
    ports = (("0.0.0.0:5757", "127.0.0.1:0"), ("0.0.0.0:9470", "127.0.0.1:0"))
    for old, new in (*ports, ("$(POD_IP)", "10.0.0.7")):
        arguments = [word.replace(old, new) for word in arguments]
    (file,) = [
        each["value"]
        for each in container(recipes, BROKER)["env"]
        if each["name"] == "NYALA_REDIS_URL_FILE"
    ]
    variables = {"NYALA_REDIS_URL_FILE": moved([file], places)[0]}
    with subprocess.Popen(
        [sys.executable, "-c", "from console.main import app; app()", *arguments],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **variables}
        | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stderr=subprocess.PIPE,
        text=True,
    ) as broker:
        assert broker.stderr is not None
        written = ""
        while "listening" not in written and (line := broker.stderr.readline()):
            written += line
        broker.terminate()
        written += broker.communicate(timeout=60)[1]

    assert '"reached_as": "tcp://10.0.0.7:5757"' in written
    assert broker.returncode == 0, written
