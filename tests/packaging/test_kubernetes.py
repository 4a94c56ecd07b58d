"""The recipes for Kubernetes start what the image has, with all that a run and its actors need.

No cluster is needed: the containers' commands run as plain processes, with files as a kubelet
mounts them. `kubernetes-validate --strict` beside CI compares the files with Kubernetes' schemas.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broker.transport.keys import load_pair
from configs.errors import SettingsError
from configs.loader import load
from configs.settings import Settings
from console.run.redis_server import free_port
from console.verbs.fleet import render
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
from tests.packaging.support.kubernetes_pods import GPU, ROOT
from tests.packaging.support.kubernetes_problems import problems
from tests.packaging.support.kubernetes_recipes import Recipes, given, rendered

ACTOR, HUB = "nyala-actor", "nyala-hub"
DEPLOYMENT, SCALED = ("Deployment", ACTOR), ("ScaledObject", ACTOR)


def settings(**fleet: object) -> Settings:
    run = {"name": "far", "model": "Qwen/Qwen3-0.6B", "environment": "calculator"}
    return Settings.model_validate({"run": run, "fleet": {"min_actors": 2, **fleet}})


@pytest.fixture
def recipes(tmp_path: Path) -> Recipes:
    return rendered(tmp_path / "out", settings(max_actors=9))


MUTANTS: dict[str, Change] = {
    "nyala-actor: the image has no program": lambda r: container(r, ACTOR)["command"].pop(0),
    "nyala-hub: arguments are in two places": lambda r: container(r, HUB).update(args=["--name"]),
    "nyala-actor: no GPU": lambda r: container(r, ACTOR)["resources"]["limits"].pop(GPU),
    "nyala-actor: --config is not given": without(ACTOR, "--config"),
    "nyala-actor: broker.endpoint is not given": without(ACTOR, "--set=broker.endpoint"),
    "broker.endpoint: nobody listens": replaced(ACTOR, "//nyala-hub:", "//hub:"),
    "broker.endpoint: nobody listens at tcp://nyala-hub:5757": without(
        HUB, "--set=broker.endpoint"
    ),
    "broker.endpoint: the way": lambda r: r.documents["Service", HUB]["spec"]["ports"].pop(0),
    "learner.advertise: the way": lambda r: r.documents["NetworkPolicy", HUB]["spec"]["ingress"][
        0
    ].update(ports=[{"port": 5757}]),
    "learner.advertise: nobody listens": replaced(HUB, "hub:5758", "hub:5759"),
    "broker.advertise: nobody listens": without(HUB, "--set=broker.advertise"),
    "the Service selects no pod": lambda r: r.documents["Service", HUB]["spec"].update(
        selector={"app": "x"}
    ),
    "nyala-actor: broker.keys is not given": without(ACTOR, "--set=broker.keys"),
    "nyala-hub: run.directory is not given": without(HUB, "--set=run.directory"),
    "nyala-actor: keys is not both": without_mount(ACTOR, "/run/nyala/keys"),
    "nyala-hub: runs is not both": without_volume(HUB, "runs"),
    "nyala-actor: nobody makes the secret x": lambda r: volume(r, ACTOR, "keys")["secret"].update(
        secretName="x"
    ),
    "nyala-hub: nobody makes the configMap x": lambda r: volume(r, HUB, "run")["configMap"].update(
        name="x"
    ),
    "nyala-hub: nobody makes the claim x": lambda r: volume(r, HUB, "runs")[
        "persistentVolumeClaim"
    ].update(claimName="x"),
    "nyala-hub: there is no file keys/x": lambda r: r.kustomization["secretGenerator"][0][
        "files"
    ].append("keys/x"),
    "nyala-actor: the image's user is 1000": lambda r: r.pod(ACTOR)["securityContext"].update(
        runAsUser=0
    ),
    "nyala-hub: may run as root": lambda r: r.pod(HUB)["securityContext"].pop("runAsNonRoot"),
    "nyala-hub: may gain rights": lambda r: container(r, HUB)["securityContext"].pop(
        "allowPrivilegeEscalation"
    ),
    "nyala-actor: keeps capabilities": lambda r: container(r, ACTOR)["securityContext"].pop(
        "capabilities"
    ),
    "nyala-actor: keys are not readable": lambda r: r.pod(ACTOR)["securityContext"].pop("fsGroup"),
    "nyala-actor: keys are not readable, or": lambda r: volume(r, ACTOR, "keys")["secret"].update(
        defaultMode=0o444
    ),
    "nyala-hub: each start opens the keys": lambda r: r.pod(HUB)["securityContext"].pop(
        "fsGroupChangePolicy"
    ),
    "nyala-actor: /tmp is not writable": without_mount(ACTOR, "/tmp"),
    "nyala-actor: /models is not writable": without_volume(ACTOR, "models"),
    "nyala-actor: /dev/shm is no memory": lambda r: volume(r, ACTOR, "shared-memory").update(
        emptyDir={}
    ),
    "nyala-actor: the grace period must be >= 30": lambda r: r.pod(ACTOR).update(
        terminationGracePeriodSeconds=29
    ),
    "nyala-actor: the grace period must be >= 140": lambda r: container(r, ACTOR)["command"].append(
        "--set=actors.drain_s=120"
    ),
    "nyala-actor: preStop": lambda r: container(r, ACTOR).update(lifecycle={"preStop": {}}),
    "nyala-actor: it is process 1": lambda r: r.pod(ACTOR).pop("shareProcessNamespace"),
    "nyala-actor: a liveness probe": lambda r: container(r, ACTOR).update(livenessProbe={}),
    "nyala-hub: the probe asks": lambda r: container(r, HUB).pop("readinessProbe"),
    "nyala-actor: the probe asks": without(ACTOR, "--set=actors.metrics_endpoint"),
    "nyala-actor: replicas would": lambda r: r.documents[DEPLOYMENT]["spec"].update(replicas=4),
    "KEDA scales nobody": lambda r: r.documents[SCALED]["spec"].update(
        scaleTargetRef={"name": "x"}
    ),
    "KEDA does not ask": lambda r: r.documents[SCALED]["spec"]["triggers"][0]["metadata"].update(
        threshold="2"
    ),
    "KEDA would multiply": lambda r: r.documents[SCALED]["spec"]["triggers"][0].update(
        metricType="Value"
    ),
    "KEDA's bounds": lambda r: r.documents[SCALED]["spec"].update(maxReplicaCount=99),
    "Prometheus does not find": lambda r: r.documents["PodMonitor", "nyala"]["spec"].update(
        podMetricsEndpoints=[]
    ),
}


def test_nothing_is_wrong_with_the_files(recipes, tmp_path):
    assert problems(recipes) == []

    long = Settings.model_validate(
        {"run": {"model": "m"}, "actors": {"drain_s": 120.5, "tensor_parallel_size": 4}}
    )
    others = rendered(tmp_path / "long", long)
    assert problems(others) == []
    assert container(others, ACTOR)["resources"]["limits"][GPU] == 4
    assert others.documents[SCALED]["spec"]["maxReplicaCount"] == long.broker.max_actors


@pytest.mark.parametrize("answer", MUTANTS)
def test_each_mistake_in_such_files_is_found(recipes, answer):
    MUTANTS[answer](recipes)

    assert [text for text in problems(recipes) if text.startswith(answer)]


@pytest.mark.parametrize("name", [ACTOR, HUB])
def test_the_settings_that_a_container_changes_are_taken(recipes, name):
    changes = {k: v for k, v in given(container(recipes, name)).items() if k != "--config"}

    taken = load(recipes.folder / "config.yaml", [f"{k}={v}" for k, v in changes.items()])

    assert str(taken.broker.keys) == changes["broker.keys"]
    assert taken.run.folder == Path(changes["run.directory"]) / "far"


def test_rendering_again_keeps_the_keys_and_takes_new_settings(recipes):
    key = load_pair(recipes.folder / "keys", "broker")

    again = rendered(recipes.folder, settings(max_actors=5))

    assert load_pair(again.folder / "keys", "broker") == key
    assert again.documents[SCALED]["spec"]["maxReplicaCount"] == 5
    assert load(again.folder / "config.yaml").fleet.max_actors == 5


def test_what_pods_cannot_have_is_refused(tmp_path):
    made = Settings.model_validate({"run": {"model": "init"}})
    with pytest.raises(
        SettingsError, match=r"run\.model must be a name on the Hugging Face hub, .* got init"
    ):
        render(made, "kubernetes", tmp_path)
    groups = Settings.model_validate({"run": {"model": "m"}, "learner": {"broadcast": True}})
    with pytest.raises(
        SettingsError, match=r"must be null or false on Kubernetes, where .* got true"
    ):
        render(groups, "kubernetes", tmp_path)
    shares = {"run": {"model": "m"}, "actors": {"share_endpoint": "tcp://0.0.0.0:0"}}
    with pytest.raises(SettingsError, match=r"actors\.share_endpoint must be null on Kubernetes"):
        render(Settings.model_validate(shares), "kubernetes", tmp_path)
    with pytest.raises(SettingsError, match="OUT must be a path without spaces"):
        render(settings(), "slurm", tmp_path / "my files")


def test_the_hub_begins_with_its_keys_once(recipes, tmp_path):
    (keys,) = recipes.pod(HUB)["initContainers"]
    places = {"/run/nyala/keys": mounted(tmp_path, recipes, HUB), "/srv/nyala/runs": tmp_path}

    subprocess.run(moved(keys["command"], places), check=True, timeout=60)
    made = tmp_path / "keys"
    assert load_pair(made, "broker") == load_pair(recipes.folder / "keys", "broker")
    (enrolment,) = (made / "allowed" / "enrolment").iterdir()
    enrolment.unlink()  # as a revocation does
    subprocess.run(moved(keys["command"], places), check=True, timeout=60)

    assert not enrolment.exists(), "it would be allowed again by each new pod"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_containers_command_looks_for_the_broker_and_leaves_when_told(recipes, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text((recipes.folder / "config.yaml").read_text())
    places = {
        "/run/nyala/keys": mounted(tmp_path, recipes, ACTOR),
        "/run/nyala/run": run,
        "/tmp": tmp_path / "tmp",
    }
    broker = f"tcp://127.0.0.1:{free_port()}"
    nyala, *arguments = moved(container(recipes, ACTOR)["command"], places)
    assert nyala == "nyala"
    arguments = [word.replace("tcp://nyala-hub:5757", broker) for word in arguments]
    arguments += ["--set", "actors.engine=torch"]  # which any machine can run
    script = [sys.executable, "-c", "from console.main import app; app()"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    with subprocess.Popen(
        [*script, *arguments],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as actor:
        assert actor.stderr is not None
        written = ""
        while "looking for" not in written and (line := actor.stderr.readline()):
            written += line
        actor.send_signal(signal.SIGTERM)
        written += actor.communicate(timeout=60)[1]

    assert f"looking for the broker at {broker}" in written
    assert actor.returncode == 0, written
