"""actor.kubernetes.yaml starts what the image has, with all that an actor needs.

No cluster is needed: the container's command runs as a plain process, with files as a kubelet
mounts them. `kubernetes-validate --strict` beside CI compares the file with Kubernetes' schemas.
"""

import copy
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.transport.keys import make_keys
from console.run.redis_server import free_port
from tests.broker.support.mounted_secret import mount
from tests.packaging.support.kubernetes_file import (
    GPU,
    ROOT,
    load_kubernetes,
    pod_of,
    problems,
    wanted_keys,
)

Change = Callable[[dict[str, Any], dict[str, Any]], object]


def without(word: str) -> Change:
    """Take the arguments out that begin so."""
    return lambda _pod, c: c.update(command=[w for w in c["command"] if not w.startswith(word)])


def without_volume(name: str) -> Change:
    return lambda pod, _c: pod.update(volumes=[v for v in pod["volumes"] if v["name"] != name])


def without_mount(place: str) -> Change:
    return lambda _pod, c: c.update(
        volumeMounts=[m for m in c["volumeMounts"] if m["mountPath"] != place]
    )


def volume(pod: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(v for v in pod["volumes"] if v["name"] == name)
    return found


MUTANTS: dict[str, Change] = {
    "the image has no program": lambda _pod, c: c.update(command=c["command"][1:]),
    "the image has no program []": lambda _pod, c: c.update(args=c.pop("command")),
    "arguments are in two places": lambda _pod, c: c.update(args=["--name", "x"]),
    "no GPU": lambda _pod, c: c["resources"]["limits"].pop(GPU),
    "broker.endpoint is not given": without("--set=broker.endpoint"),
    "broker.keys is not given": without("--set=broker.keys"),
    "run.model is not given": without("--set=run.model"),
    "run.directory is not given": without("--set=run.directory"),
    "NYALA_BROKER is not in the environment": lambda _pod, c: c["env"].pop(0),
    "nobody makes the key address": lambda _pod, c: c["env"][0]["valueFrom"][
        "configMapKeyRef"
    ].update(key="address"),
    "keys is not both a volume and mounted": without_mount("/run/nyala/keys"),
    "run is not both a volume and mounted": without_volume("run"),
    "no secret brings": lambda pod, _c: volume(pod, "keys")["secret"].update(secretName="x"),
    "no configMap brings": lambda pod, _c: volume(pod, "run")["configMap"].update(name="x"),
    "the image's user is 1000": lambda pod, _c: pod["securityContext"].pop("runAsUser"),
    "the image's user is 1000, by": lambda pod, _c: pod["securityContext"].update(runAsUser=0),
    "may run as root": lambda pod, _c: pod["securityContext"].pop("runAsNonRoot"),
    "may gain rights": lambda _pod, c: c["securityContext"].pop("allowPrivilegeEscalation"),
    "keeps capabilities": lambda _pod, c: c["securityContext"].pop("capabilities"),
    "keys are not readable": lambda pod, _c: pod["securityContext"].pop("fsGroup"),
    "keys are not readable, or": lambda pod, _c: volume(pod, "keys")["secret"].pop("defaultMode"),
    "keys are not readable, or open": lambda pod, _c: volume(pod, "keys")["secret"].update(
        defaultMode=0o444
    ),
    "/tmp is not writable": without_mount("/tmp"),
    "/home/nyala is not writable": without_mount("/home/nyala"),
    "/models is not writable": without_volume("models"),
    "/dev/shm is not writable": without_mount("/dev/shm"),
    "/dev/shm is no memory": lambda pod, _c: volume(pod, "shared-memory").update(emptyDir={}),
    "the grace period must be >= 30": lambda pod, _c: (
        pod.pop("terminationGracePeriodSeconds") and pod.update(terminationGracePeriodSeconds=29)
    ),
    "the grace period must be >= 140": lambda _pod, c: c["command"].append(
        "--set=actors.drain_s=120"
    ),
    "preStop takes": lambda _pod, c: c.update(lifecycle={"preStop": {"exec": {"command": []}}}),
    "the actor is process 1": lambda pod, _c: pod.pop("shareProcessNamespace"),
    "the probe asks": lambda _pod, c: c.pop("readinessProbe"),
    "the probe asks where": lambda _pod, c: c["readinessProbe"]["httpGet"].update(path="/health"),
    "the probe asks where the actor": without("--set=actors.metrics_endpoint"),
    "the probe asks where the actor does not": lambda _pod, c: c["ports"][0].update(
        containerPort=9
    ),
    "a liveness probe": lambda _pod, c: c.update(livenessProbe=c["readinessProbe"]),
}


def test_nothing_is_wrong_with_the_file():
    assert problems(load_kubernetes()) == []


@pytest.mark.parametrize("answer", MUTANTS)
def test_each_mistake_in_such_a_file_is_found(answer):
    document = copy.deepcopy(load_kubernetes())
    pod = pod_of(document)

    MUTANTS[answer](pod, pod["containers"][0])

    assert [text for text in problems(document) if text.startswith(answer)]


@pytest.fixture
def mounts(tmp_path):
    """Every mount of the container -> a folder as a kubelet makes it."""
    keys = make_keys(tmp_path / "made")
    files = [keys / name for name in sorted(wanted_keys()["nyala-actor"])]
    is_root = os.geteuid() == 0
    secret = mount(
        tmp_path / "keys",
        files,
        owner=0 if is_root else -1,
        group=os.getegid() if is_root else -1,
        mode=0o440 if is_root else 0o400,
    )
    config = tmp_path / "config.yaml"
    tree = {"run": {"name": "far", "model": "init", "environment": "calculator"}}
    config.write_text(yaml.safe_dump(tree))
    run = mount(tmp_path / "run", [config], owner=-1, group=-1, mode=0o644)
    found = {"/run/nyala/keys": secret, "/run/nyala/run": run, "/models": tmp_path / "models"}
    return found | {"/tmp": tmp_path / "tmp"}


def expanded(words: list[str], values: dict[str, str], mounts: dict[str, Path]) -> list[str]:
    """Fill variables in as a kubelet does, and put our folders where the container has mounts."""
    filled = [re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], word) for word in words]
    return [
        re.sub(rf"(?<==)({'|'.join(mounts)})\b", lambda match: str(mounts[match[1]]), word)
        for word in filled
    ]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_containers_command_looks_for_the_broker_and_leaves_when_told(mounts, tmp_path):
    (container,) = pod_of(load_kubernetes())["containers"]
    broker = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    values = {"NYALA_BROKER": broker, "NYALA_MODEL": "/models/own"}
    nyala, *arguments = expanded(container["command"], values, mounts)
    assert nyala == "nyala"
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
