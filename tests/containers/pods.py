"""The pods of `nyala fleet render --to kubernetes`, as containers of the engine.

Each with its command, user, groups, read-only root and capabilities as written, and with mounts
whose owners and modes are those that a kubelet makes: links to a Secret's files of root, which
`fsGroup` may read; folders of root, which that group may write. No cluster, no cards,
and the CPU image.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any

from configs.loader import load
from tests.broker.support.mounted_secret import mount
from tests.containers.ring import ROOT, VOLUMES, Failed, Ring
from tests.packaging.support.kubernetes_recipes import Recipes, rendered

FOLDER = ROOT / "runs" / "pods"
IMAGE = "nyala:cpu"
MODEL = "/models/long/init"
OVERRIDES = ("run.name=pods", f"run.model={MODEL}", "run.steps=100000", "run.eval_episodes=0")
KEPT = {"runs": "nyala-runs", "models": "nyala-models"}
"""Volumes that outlive a pod: the claim, and the one that the recipe's comment offers."""


class Pods:
    """Runs containers of pods, one after the other.

    Args:
        ring: By whose engine.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        shutil.rmtree(FOLDER, ignore_errors=True)
        settings = load(ROOT / "tests" / "containers" / "long.yaml", OVERRIDES)
        self.recipes: Recipes = rendered(FOLDER / "recipes", settings)
        self._mounted = 0

    def make_volumes(self) -> None:
        """Make the network, the volumes, and a model in one of them."""
        self.remove()
        self._ring.docker("network", "create", "pods")
        for name in KEPT.values():
            self._make_volume(name)
        make = ("nyala", "init-model", "work/long.yaml", "--set=run.directory=/models")
        places = ("--volume", f"{ROOT}/tests/containers:/srv/nyala/work:ro")
        model = ("--volume", f"{KEPT['models']}:/models")
        self._ring.docker("run", "--rm", "--user", "1000", *places, *model, IMAGE, *make)

    def start(
        self, pod: str, container: Mapping[str, Any], name: str, *, secret_mode: int | None = None
    ) -> None:
        """Start one container of a pod."""
        spec = self.recipes.pod(pod)
        user = spec["securityContext"]
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
        words = [
            *("run", "--detach", "--init", "--read-only", "--name", name),
            *("--network", "pods", "--network-alias", pod),
            *("--user", f"{user['runAsUser']}:{user['runAsGroup']}"),
            *("--group-add", str(user["fsGroup"])),
            *("--security-opt", "no-new-privileges"),
            *(f"--cap-drop={name}" for name in own["capabilities"]["drop"]),
            *(f"--env={each['name']}={each['value']}" for each in container.get("env", [])),
        ]
        sources = {each["name"]: each for each in spec["volumes"]}
        for place in container["volumeMounts"]:
            words += self._mount(name, place, sources[place["name"]], user["fsGroup"], secret_mode)
        self._ring.docker(*words, IMAGE, *container["command"])

    def is_ready(self, name: str, container: Mapping[str, Any]) -> bool:
        """Ask a container's readiness probe."""
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        port = ports[container["readinessProbe"]["httpGet"]["port"]]
        ask = ("python", "configs/deploy/healthcheck.py", str(port))
        try:
            self._ring.docker("exec", name, *ask)
        except Failed:
            return False
        return True

    def stop(self, name: str, pod: str) -> tuple[int, float]:
        """Send SIGTERM, and SIGKILL after the grace time; return the exit code and the seconds."""
        grace = self.recipes.pod(pod)["terminationGracePeriodSeconds"]
        begin = time.monotonic()
        self._ring.docker("stop", "--time", str(grace), name)
        return self.exit_code(name), time.monotonic() - begin

    def exit_code(self, name: str) -> int:
        """Return with what a container has ended."""
        return int(self._ring.inspect(name)["State"]["ExitCode"])

    def remove(self) -> None:
        """Remove containers, volumes and the network."""
        for words in self._leftovers():
            try:
                self._ring.docker(*words)
            except Failed:
                continue  # there is none

    def _leftovers(self) -> Iterator[tuple[str, ...]]:
        for name in ("nyala-keys", "nyala-hub", "nyala-actor", "nyala-refused"):
            yield "rm", "--force", "--volumes", name
        for volume in (*KEPT.values(), *(path.name for path in VOLUMES.glob("pods-*"))):
            yield "volume", "rm", volume
        yield "network", "rm", "pods"

    def _mount(
        self,
        container: str,
        place: Mapping[str, Any],
        source: Mapping[str, Any],
        group: int,
        secret_mode: int | None,
    ) -> list[str]:
        target = place["mountPath"]
        end = ":ro" if place.get("readOnly") else ""
        if "secret" in source or "configMap" in source:
            self._mounted += 1
            folder = FOLDER / "mounted" / str(self._mounted)
            if "secret" in source:
                wanted = source["secret"]["secretName"]
                mode = source["secret"]["defaultMode"] if secret_mode is None else secret_mode
                generators = self.recipes.kustomization["secretGenerator"]
            else:
                wanted, mode = source["configMap"]["name"], 0o644
                generators = self.recipes.kustomization["configMapGenerator"]
            (files,) = [each["files"] for each in generators if each["name"] == wanted]
            paths = [self.recipes.folder / file for file in files]
            mount(folder, paths, owner=0, group=group, mode=mode)
            return ["--volume", f"{folder}:{target}{end}"]
        if source.get("emptyDir", {}).get("medium") == "Memory":
            return ["--mount", f"type=tmpfs,destination={target},tmpfs-size=1g,tmpfs-mode=1777"]
        volume = KEPT.get(source["name"]) or f"pods-{container}-{source['name']}"
        if volume not in KEPT.values():
            self._make_volume(volume)
        return ["--volume", f"{volume}:{target}{end}"]

    def _make_volume(self, name: str) -> None:
        """Make a folder as an emptyDir or a claim is for a pod with an fsGroup."""
        self._ring.docker("volume", "create", name)
        own = "chown 0:1000 /v && chmod 2777 /v"
        self._ring.docker("run", "--rm", "--user=0", f"--volume={name}:/v", IMAGE, "sh", "-c", own)
