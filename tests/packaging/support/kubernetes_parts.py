"""Mistakes in the recipes of brokers and learner as pods of their own."""

from collections.abc import Iterator

from tests.packaging.support.kubernetes_recipes import Recipes, given, writable

REDIS_FILE = "/run/nyala/redis/redis.url"


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
