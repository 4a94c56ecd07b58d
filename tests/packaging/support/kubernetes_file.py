"""configs/deploy/actor.kubernetes.yaml, and what is wrong with such a file for our image."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from configs.settings import ActorSettings

ROOT = Path(__file__).parents[3]
PATH = ROOT / "configs" / "deploy" / "actor.kubernetes.yaml"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
GPU = "nvidia.com/gpu"
AFTER_DRAIN_S = 20  # to leave, and to end engine and rewards
WRITABLE = ("/tmp", "/home/nyala", "/models", "/dev/shm")


def load_kubernetes() -> dict[str, Any]:
    """Read the Deployment."""
    document: dict[str, Any] = yaml.safe_load(PATH.read_text(encoding="utf-8"))
    return document


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the pod's specification."""
    pod: dict[str, Any] = document["spec"]["template"]["spec"]
    return pod


def wanted_keys() -> dict[str, set[str]]:
    """The keys that the commands in the file's head put into each Secret and config map."""
    head = PATH.read_text(encoding="utf-8").partition("apiVersion")[0].replace("\\\n#", "")
    found = {}
    for name, rest in re.findall(r"create (?:secret generic|configmap) ([\w-]+)(.*)", head):
        found[name] = set(re.findall(r"--from-(?:file|literal)=([\w.]+)", rest))
    return found


def problems(document: dict[str, Any]) -> list[str]:
    """List what would keep these pods from starting, sampling or leaving."""
    pod = pod_of(document)
    (container,) = pod["containers"]
    checks = (_of_program, _of_settings, _of_sources, _of_user, _of_places, _of_the_end, _of_probe)
    return [text for check in checks for text in check(pod, container)]


def _of_program(_pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    command = container.get("command", [])  # the image has no entry point
    if not command or command[0] not in project["scripts"]:
        yield f"the image has no program {command[:1]}"
    if "ENTRYPOINT []" not in DOCKERFILE or ".venv/bin:$PATH" not in DOCKERFILE:
        yield "the image's programs are elsewhere"
    if container.get("args"):
        yield "arguments are in two places"
    if GPU not in container.get("resources", {}).get("limits", {}):
        yield "no GPU"


def _of_settings(_pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    command = container.get("command", [])
    given = {word.removeprefix("--set=").partition("=")[0] for word in command if "--set=" in word}
    for key in ("broker.endpoint", "broker.keys", "run.model", "run.directory"):
        if key not in given:
            yield f"{key} is not given"
    named = set(re.findall(r"\$\((\w+)\)", " ".join(command)))
    for name in sorted(named - {each["name"] for each in container.get("env", [])}):
        yield f"{name} is not in the environment"


def _of_sources(pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    made = wanted_keys()
    for each in container.get("env", []):
        if (source := each.get("valueFrom", {}).get("configMapKeyRef")) is not None and source[
            "key"
        ] not in made.get(source["name"], ()):
            yield f"nobody makes the key {source['key']} of {source['name']}"
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    mounts = container.get("volumeMounts", [])
    for name in sorted({mount["name"] for mount in mounts} ^ set(volumes)):
        yield f"{name} is not both a volume and mounted"
    needed = {"secret": {"enrolment.key", "broker.pub"}, "configMap": {"config.yaml"}}
    for kind, files in needed.items():
        names = [
            v[kind].get("secretName", v[kind].get("name")) for v in volumes.values() if kind in v
        ]
        if not any(files <= made.get(name, set()) for name in names):
            yield f"no {kind} brings {', '.join(sorted(files))}"


def _of_user(pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    context, own = pod.get("securityContext", {}), container.get("securityContext", {})
    uid = int(re.findall(r"^ARG UID=(\d+)$", DOCKERFILE, re.MULTILINE)[0])
    if context.get("runAsUser") != uid:
        yield f"the image's user is {uid}, by its number"
    if context.get("runAsNonRoot") is not True:
        yield "may run as root"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "may gain rights"
    if own.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "keeps capabilities"
    modes = [v["secret"].get("defaultMode", 0o644) for v in pod["volumes"] if "secret" in v]
    if context.get("fsGroup") != uid or any(mode & ~0o440 for mode in modes):
        yield "keys are not readable, or open to others"  # `_is_mounted_secret` in keys.py


def _of_places(pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    places = {
        mount["mountPath"]: volumes.get(mount["name"], {})
        for mount in container.get("volumeMounts", [])
        if not mount.get("readOnly")
    }
    for place in WRITABLE:
        if not {"emptyDir", "persistentVolumeClaim"} & set(places.get(place, {})):
            yield f"{place} is not writable"
    shared = places.get("/dev/shm", {}).get("emptyDir", {})
    if shared.get("medium") != "Memory":
        yield "/dev/shm is no memory"


def _of_the_end(pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    drain_s = ActorSettings().drain_s
    for word in container.get("command", []):
        if word.startswith("--set=actors.drain_s="):
            drain_s = float(word.rpartition("=")[2])
    if pod.get("terminationGracePeriodSeconds", 30) < drain_s + AFTER_DRAIN_S:
        yield f"the grace period must be >= {drain_s + AFTER_DRAIN_S:g} s"
    if "preStop" in container.get("lifecycle", {}):
        yield "preStop takes from the time to drain"
    if pod.get("shareProcessNamespace") is not True:
        yield "the actor is process 1, which ignores SIGTERM while it loads"


def _of_probe(_pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    probe = container.get("readinessProbe", {}).get("httpGet", {})
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
    serves = f"--set=actors.metrics_endpoint=http://0.0.0.0:{ports.get(probe.get('port'))}"
    if probe.get("path") != "/readyz" or serves not in container.get("command", []):
        yield "the probe asks where the actor does not answer"
    if "livenessProbe" in container:
        yield "a liveness probe would end actors while they start"
