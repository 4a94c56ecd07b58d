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
WRITABLE = ("/tmp", "/home/nyala")
OF_ENGINES = ("/models", "/dev/shm")
"""Where those with a model write, beside."""
JOBS = ("nyala-hub", "nyala-learner")
NAMES = (*JOBS, "nyala-broker", "nyala-actor")
REDIS_FILE = "/run/nyala/redis/redis.url"
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
        pod: Document = self.documents[kind_of(name), name]["spec"]["template"]["spec"]
        return pod

    @property
    def names(self) -> list[str]:
        """Names of the pods: those of a hub, or of broker and learner apart, and actors'."""
        return [name for name in NAMES if (kind_of(name), name) in self.documents]

    @property
    def broker(self) -> str:
        """Name of the pods in which brokers run."""
        return "nyala-broker" if "nyala-broker" in self.names else "nyala-hub"

    @property
    def learner(self) -> str:
        """Name of the pods in which the learner runs."""
        return "nyala-learner" if "nyala-learner" in self.names else "nyala-hub"


def kind_of(name: str) -> str:
    """Return the kind of what starts these pods."""
    return "Job" if name in JOBS else "Deployment"


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
    for name in recipes.names:
        pod = recipes.pod(name)
        container = pod["containers"][0]
        checks = [_of_program, _of_user, _of_places, _of_the_end]
        if name != "nyala-broker":
            checks += [_of_cards, _of_shared_memory]
        if name != "nyala-learner":  # nobody waits for it
            checks.append(_of_probe)
        found += [f"{name}: {text}" for check in checks for text in check(pod, container)]
        found += [f"{name}: {text}" for text in _of_sources(recipes, pod, container)]
    found += [f"nyala-actor: {text}" for text in _of_the_actor(recipes)]
    if "nyala-broker" in recipes.names:
        found += problems_of_parts(recipes)
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


def writable(pod: Document, container: Document) -> Document:
    """Return the volumes that a container may write, by their places."""
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    return {
        mount["mountPath"]: volumes.get(mount["name"], {})
        for mount in container.get("volumeMounts", [])
        if not mount.get("readOnly")
    }


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
    """From an actor to broker and publisher: name, port, listener, policy."""
    asked = given(recipes.pod("nyala-actor")["containers"][0])
    brokers = given(recipes.pod(recipes.broker)["containers"][0])
    learner = given(recipes.pod(recipes.learner)["containers"][0])
    own = "$(POD_IP)" if recipes.broker == "nyala-broker" else "nyala-hub"
    publisher = "nyala-hub" if recipes.learner == "nyala-hub" else "nyala-learner-0.nyala-learner"
    at, published_at = brokers.get("broker.endpoint"), learner.get("learner.publisher_endpoint")
    ways = (
        ("broker.endpoint", asked.get("broker.endpoint", ""), at, recipes.broker, recipes.broker),
        ("broker.advertise", _named(brokers, "broker"), at, own, recipes.broker),
        ("learner.advertise", _named(learner, "learner"), published_at, publisher, recipes.learner),
    )
    for name, to, listens, host, pods in ways:
        named, port = to.removeprefix("tcp://").rpartition(":")[::2]
        if named != host or listens != f"tcp://0.0.0.0:{port}":
            yield f"{name}: nobody listens at {to}"
        elif int(port) not in _open_to_actors(recipes, pods):
            yield f"{name}: the way to {to} is closed"
    for pods in {recipes.broker, recipes.learner}:
        service = recipes.documents["Service", pods]["spec"]
        if service["selector"] != {"app": pods}:
            yield "the Service selects no pod"
        if service.get("clusterIP") != "None":
            yield "the Service has an address of its own, behind which pods change unseen"


def _named(settings: dict[str, str], role: str) -> str:
    return f"tcp://{settings.get(f'{role}.advertise', '')}"


def _open_to_actors(recipes: Recipes, pods: str) -> set[int]:
    """Return the ports of these pods that their Service offers and their policy opens to actors."""
    offered = {port["port"] for port in recipes.documents["Service", pods]["spec"]["ports"]}
    policy = recipes.documents["NetworkPolicy", pods]["spec"]["ingress"]
    return offered & {
        port["port"]
        for rule in policy
        if {"podSelector": {"matchLabels": {"app": "nyala-actor"}}} in rule["from"]
        for port in rule["ports"]
    }


def _of_scaling(recipes: Recipes) -> Iterator[str]:
    scaled = recipes.documents["ScaledObject", "nyala-actor"]["spec"]
    if scaled["scaleTargetRef"]["name"] != "nyala-actor":
        yield "KEDA scales nobody"
    (trigger,) = scaled["triggers"]
    pods = re.findall(r'pod=~"(.*)"', trigger["metadata"]["query"])
    if not pods or not re.fullmatch(pods[0], f"{recipes.broker}-5d9f-x"):
        yield "KEDA asks pods that have no number"
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
    named = {
        port["name"]
        for pods in {recipes.broker, recipes.learner}
        for port in recipes.pod(pods)["containers"][0]["ports"]
    }
    (expression,) = monitor["selector"]["matchExpressions"]
    if not {"metrics", "learner"} <= ports & named or not set(recipes.names) <= set(
        expression["values"]
    ):
        yield "Prometheus does not find the broker's page"


def problems_of_parts(recipes: Recipes) -> list[str]:
    """List what is wrong with brokers and learner as pods of their own."""
    found = [f"nyala-broker: {text}" for text in _of_the_brokers(recipes)]
    found += [f"nyala-learner: {text}" for text in _of_the_learner(recipes)]
    for name in recipes.names:
        variables = {v["name"]: v for v in recipes.pod(name)["containers"][0].get("env", [])}
        has_way = variables.get("NYALA_REDIS_URL_FILE", {}).get("value") == REDIS_FILE
        secrets = {v["secret"]["secretName"] for v in recipes.pod(name)["volumes"] if "secret" in v}
        if name == "nyala-actor" and ("nyala-redis" in secrets or has_way):
            found.append("nyala-actor: it has a way to Redis")
        if name != "nyala-actor" and not ("nyala-redis" in secrets and has_way):
            found.append(f"{name}: it has no way to Redis")
    return found


def _of_the_brokers(recipes: Recipes) -> Iterator[str]:
    spec = recipes.documents["Deployment", "nyala-broker"]["spec"]
    if spec.get("replicas") != 2:
        yield "one broker is one point of failure"
    budget = recipes.documents.get(("PodDisruptionBudget", "nyala-broker"), {}).get("spec", {})
    if budget.get("maxUnavailable") != 1:
        yield "both could be drained at once"
    variables = {v["name"]: v for v in recipes.pod("nyala-broker")["containers"][0]["env"]}
    source = variables.get("POD_IP", {}).get("valueFrom", {})
    if source != {"fieldRef": {"fieldPath": "status.podIP"}}:
        yield "it has no address to announce"
    pod, learner = recipes.pod("nyala-broker"), recipes.pod("nyala-learner")
    place = f"{given(pod['containers'][0]).get('broker.keys')}/allowed"
    written = writable(pod, pod["containers"][0]).get(place, {}).get("persistentVolumeClaim")
    read = {mount["mountPath"]: mount for mount in learner["containers"][0]["volumeMounts"]}.get(
        f"{given(learner['containers'][0]).get('broker.keys')}/allowed", {}
    )
    sources = {volume["name"]: volume for volume in learner["volumes"]}
    same = sources.get(read.get("name"), {}).get("persistentVolumeClaim")
    if written is None or written != same:
        yield "brokers and publisher do not share what actors register"
    elif _access(recipes, written["claimName"]) != ["ReadWriteMany"]:
        yield "one node alone has what actors register"
    if read.get("readOnly") is not True:
        yield "the learner could let anybody in"


def _of_the_learner(recipes: Recipes) -> Iterator[str]:
    spec = recipes.documents["Job", "nyala-learner"]["spec"]
    pod, nodes = recipes.pod("nyala-learner"), recipes.settings.fleet.learner_nodes
    container = pod["containers"][0]
    if spec.get("completionMode") != "Indexed":
        yield "its pods have no numbers"
    words = dict(word.split("=", 1) for word in container["command"] if word.startswith("--n"))
    if not spec.get("completions") == spec.get("parallelism") == nodes == int(words["--nodes"]):
        yield "its nodes are not those of the settings"
    if words.get("--node-rank") != "$(JOB_COMPLETION_INDEX)":
        yield "its nodes do not know their numbers"
    if given(container).get("--rendezvous", "").rpartition(":")[0] != (
        f"nyala-learner-0.{pod.get('subdomain')}"
    ):
        yield "its nodes do not meet"
    service = recipes.documents["Service", "nyala-learner"]["spec"]
    if pod.get("subdomain") != "nyala-learner" or not service.get("publishNotReadyAddresses"):
        yield "pod 0 has no name"
    own = [{"podSelector": {"matchLabels": {"app": "nyala-learner"}}}]
    rules = recipes.documents["NetworkPolicy", "nyala-learner"]["spec"]["ingress"]
    if not any(rule["from"] == own and "ports" not in rule for rule in rules):
        yield "its ranks do not reach each other"
    (claim,) = [
        volume["persistentVolumeClaim"]["claimName"]
        for place, volume in writable(pod, container).items()
        if place == given(container)["run.directory"]
    ] or [""]
    wanted = "ReadWriteOnce" if nodes == 1 else "ReadWriteMany"
    if _access(recipes, claim) != [wanted]:
        yield "its nodes do not share the run's folder, or one node asks for more than it needs"
    if given(container).get("learner.exit_when_told", "0") == "0":
        yield "the Job would be complete where a node is drained"


def _access(recipes: Recipes, claim: str) -> list[str]:
    found = recipes.documents.get(("PersistentVolumeClaim", claim), {"spec": {}})
    modes: list[str] = found["spec"].get("accessModes", [])
    return modes
