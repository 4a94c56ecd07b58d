"""The recipes for Kubernetes as `nyala fleet render` writes them, and what is wrong with such."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.settings import Settings
from console.fleet.render import render

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
GPU = "nvidia.com/gpu"
AFTER_DRAIN_S = 20  # to leave, and to end engine and rewards
WRITABLE = ("/tmp", "/home/nyala", "/models", "/dev/shm")
GAUGE = "nyala_actors_wanted"

Document = dict[str, Any]


@dataclass
class Recipes:
    """The parsed files of one folder."""

    kustomization: Document
    documents: dict[tuple[str, str], Document]
    """By kind and name."""
    settings: Settings
    folder: Path

    def pod(self, name: str) -> Document:
        """Return the specification of the pods of a Deployment or a Job."""
        kind = "Job" if name == "nyala-hub" else "Deployment"
        pod: Document = self.documents[kind, name]["spec"]["template"]["spec"]
        return pod


def rendered(folder: Path, settings: Settings) -> Recipes:
    """Render into a folder, and read what came of it."""
    render(settings, "kubernetes", folder)
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    documents = [
        document
        for name in kustomization["resources"]
        for document in yaml.safe_load_all((folder / name).read_text())
    ]
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert len(by_name) == len(documents)
    return Recipes(kustomization, by_name, settings, folder)


def problems(recipes: Recipes) -> list[str]:
    """List what would keep the pods from starting, meeting, sampling, being counted or leaving."""
    found = [*_of_scaling(recipes), *_of_the_way(recipes)]
    for name in ("nyala-hub", "nyala-actor"):
        pod = recipes.pod(name)
        container = pod["containers"][0]
        checks = (_of_program, _of_user, _of_places, _of_the_end, _of_probe)
        found += [f"{name}: {text}" for check in checks for text in check(pod, container)]
        found += [f"{name}: {text}" for text in _of_sources(recipes, pod, container)]
    found += [f"nyala-actor: {text}" for text in _of_the_actor(recipes)]
    return found


def given(container: Document) -> dict[str, str]:
    """Return the settings that a command changes."""
    words = [word.removeprefix("--set=") for word in container.get("command", []) if "=" in word]
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def _of_program(_pod: Document, container: Document) -> Iterator[str]:
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
    for key in ("--config", "broker.endpoint", "broker.keys", "run.directory"):
        if key not in given(container):
            yield f"{key} is not given"


def _of_sources(recipes: Recipes, pod: Document, container: Document) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    containers = [container, *pod.get("initContainers", [])]
    mounts = [mount for each in containers for mount in each.get("volumeMounts", [])]
    for name in sorted({mount["name"] for mount in mounts} ^ set(volumes)):
        yield f"{name} is not both a volume and mounted"
    made = {
        ("secret" if "secret" in generator else "configMap", each["name"])
        for generator in ("secretGenerator", "configMapGenerator")
        for each in recipes.kustomization.get(generator, [])
    }
    for volume in volumes.values():
        for kind in {"secret", "configMap"} & set(volume):
            name = volume[kind].get("secretName", volume[kind].get("name"))
            if (kind, name) not in made:
                yield f"nobody makes the {kind} {name}"
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and ("PersistentVolumeClaim", claim) not in recipes.documents:
            yield f"nobody makes the claim {claim}"
    generators = (*recipes.kustomization["secretGenerator"],)
    generators += (*recipes.kustomization["configMapGenerator"],)
    for file in [file for each in generators for file in each["files"]]:
        if not (recipes.folder / file).exists():
            yield f"there is no file {file}"


def _of_user(pod: Document, container: Document) -> Iterator[str]:
    context, own = pod.get("securityContext", {}), container.get("securityContext", {})
    uid = int(re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)[0])
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
    if context.get("fsGroupChangePolicy") != "OnRootMismatch":
        yield "each start opens the keys on a volume to the group"


def _of_places(pod: Document, container: Document) -> Iterator[str]:
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


def _of_the_end(pod: Document, container: Document) -> Iterator[str]:
    if "preStop" in container.get("lifecycle", {}):
        yield "preStop takes from the time to drain"
    if pod.get("shareProcessNamespace") is not True:
        yield "it is process 1, which ignores SIGTERM while it loads"
    if "livenessProbe" in container:
        yield "a liveness probe would end it while it starts"


def _of_probe(_pod: Document, container: Document) -> Iterator[str]:
    probe = container.get("readinessProbe", {}).get("httpGet", {})
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
    if probe.get("path") != "/readyz" or not ports.get(probe.get("port")):
        yield "the probe asks where nobody answers"
    served = {value for key, value in given(container).items() if "metrics_endpoint" in key}
    if f"http://0.0.0.0:{ports.get(probe.get('port'))}" not in served:
        yield "the probe asks where nobody answers"


def _of_the_actor(recipes: Recipes) -> Iterator[str]:
    pod, drain_s = recipes.pod("nyala-actor"), recipes.settings.actors.drain_s
    settings = given(pod["containers"][0])
    drain_s = float(settings.get("actors.drain_s", drain_s))
    if pod.get("terminationGracePeriodSeconds", 30) < drain_s + AFTER_DRAIN_S:
        yield f"the grace period must be >= {drain_s + AFTER_DRAIN_S:g} s"
    if "replicas" in recipes.documents["Deployment", "nyala-actor"]["spec"]:
        yield "replicas would undo what KEDA decides, at each apply"
    if any("persistentVolumeClaim" in volume for volume in pod["volumes"]):
        yield "a claim of one node cannot be shared"


def _of_the_way(recipes: Recipes) -> Iterator[str]:
    """From an actor to the hub: name, port, listener, policy."""
    hub = recipes.pod("nyala-hub")["containers"][0]
    listens = given(hub)
    service = recipes.documents["Service", "nyala-hub"]
    offered = {port["port"] for port in service["spec"]["ports"]}
    policy = recipes.documents["NetworkPolicy", "nyala-hub"]["spec"]["ingress"]
    admitted = {
        port["port"]
        for rule in policy
        if {"podSelector": {"matchLabels": {"app": "nyala-actor"}}} in rule["from"]
        for port in rule["ports"]
    }
    asked = given(recipes.pod("nyala-actor")["containers"][0])
    ways = {
        "broker.endpoint": (asked.get("broker.endpoint", ""), listens.get("broker.endpoint", "")),
        "broker.advertise": (
            f"tcp://{listens.get('broker.advertise', '')}",
            listens.get("broker.endpoint", ""),
        ),
        "learner.advertise": (
            f"tcp://{listens.get('learner.advertise', '')}",
            listens.get("learner.publisher_endpoint", ""),
        ),
    }
    for name, (to, at) in ways.items():
        host, port = to.removeprefix("tcp://").rpartition(":")[::2]
        if host != "nyala-hub" or at != f"tcp://0.0.0.0:{port}":
            yield f"{name}: nobody listens at {to}"
        elif int(port) not in offered or int(port) not in admitted:
            yield f"{name}: the way to {to} is closed"
    if service["spec"]["selector"] != {"app": "nyala-hub"}:
        yield "the Service selects no pod"


def _of_scaling(recipes: Recipes) -> Iterator[str]:
    scaled = recipes.documents["ScaledObject", "nyala-actor"]["spec"]
    if scaled["scaleTargetRef"]["name"] != "nyala-actor":
        yield "KEDA scales nobody"
    (trigger,) = scaled["triggers"]
    if GAUGE not in trigger["metadata"]["query"] or trigger["metadata"]["threshold"] != "1":
        yield "KEDA does not ask for the number of actors"
    if trigger["metricType"] != "AverageValue":
        yield "KEDA would multiply the number by the pods there are"
    fleet = recipes.settings.fleet
    most = fleet.max_actors or recipes.settings.broker.max_actors
    if (scaled["minReplicaCount"], scaled["maxReplicaCount"]) != (fleet.min_actors, most):
        yield "KEDA's bounds are not the fleet's"
    monitor = recipes.documents["PodMonitor", "nyala"]["spec"]
    ports = {each["port"] for each in monitor["podMetricsEndpoints"]}
    named = {port["name"] for port in recipes.pod("nyala-hub")["containers"][0]["ports"]}
    if not {"metrics", "learner"} <= ports & named:
        yield "Prometheus does not find the broker's page"
