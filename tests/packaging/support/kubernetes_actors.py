"""Mistakes that keep actors from meeting broker and publisher, being counted, or leaving."""

import re
from collections.abc import Iterator

from tests.packaging.support.kubernetes_recipes import Recipes, given

AFTER_DRAIN_S = 20  # to leave, and to end engine and rewards
GAUGE = "nyala_actors_wanted"


def problems_of_actors(recipes: Recipes) -> list[str]:
    """List what is wrong with the actors' recipe and with what others do for them."""
    found = [*_of_scaling(recipes), *_of_the_way(recipes)]
    return found + [f"nyala-actor: {text}" for text in _of_the_actor(recipes)]


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
