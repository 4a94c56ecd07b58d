"""Mistakes in the recipe of one pod, whichever it is: program, files, user, places, end, probe."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.packaging.support.kubernetes_recipes import Document, Recipes, given, writable

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
GPU = "nvidia.com/gpu"
WRITABLE = ("/tmp", "/home/nyala")
OF_ENGINES = ("/models", "/dev/shm")
"""Where those with a model write, beside."""


def problems_of_pod(recipes: Recipes, name: str) -> list[str]:
    """List what is wrong with the pods of this name by themselves."""
    pod = recipes.pod(name)
    container = pod["containers"][0]
    checks = [_of_program, _of_user, _of_places, _of_the_end]
    if name != "nyala-broker":
        checks += [_of_cards, _of_shared_memory]
    if name != "nyala-learner":  # nobody waits for it
        checks.append(_of_probe)
    found = [f"{name}: {text}" for check in checks for text in check(pod, container)]
    return found + [f"{name}: {text}" for text in _of_sources(recipes, pod, container)]


def _of_program(_pod: Document, container: Document) -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    command = container.get("command", [])  # the image has no entry point
    if not command or command[0] not in project["scripts"]:
        yield f"the image has no program {command[:1]}"
    if "ENTRYPOINT []" not in DOCKERFILE or ".venv/bin:$PATH" not in DOCKERFILE:
        yield "the image's programs are elsewhere"
    if container.get("args"):
        yield "arguments are in two places"
    for key in ("--config", "broker.endpoint", "broker.keys", "run.directory"):
        if key not in given(container):
            yield f"{key} is not given"


def _of_cards(_pod: Document, container: Document) -> Iterator[str]:
    if GPU not in container.get("resources", {}).get("limits", {}):
        yield "no GPU"


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


def _of_places(
    pod: Document, container: Document, needed: tuple[str, ...] = WRITABLE
) -> Iterator[str]:
    places = writable(pod, container)
    for place in needed:
        if not {"emptyDir", "persistentVolumeClaim"} & set(places.get(place, {})):
            yield f"{place} is not writable"


def _of_shared_memory(pod: Document, container: Document) -> Iterator[str]:
    yield from _of_places(pod, container, OF_ENGINES)
    shared = writable(pod, container).get("/dev/shm", {}).get("emptyDir", {})
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
