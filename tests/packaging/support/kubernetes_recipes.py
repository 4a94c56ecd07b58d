"""The recipes for Kubernetes as `nyala fleet render` writes them, parsed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.settings import Settings
from console.verbs.fleet import render

JOBS = ("nyala-hub", "nyala-learner")
NAMES = (*JOBS, "nyala-broker", "nyala-actor")

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


def given(container: Document) -> dict[str, str]:
    """Return the settings that a command changes."""
    words = [word.removeprefix("--set=") for word in container.get("command", []) if "=" in word]
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def writable(pod: Document, container: Document) -> Document:
    """Return the volumes that a container may write, by their places."""
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    return {
        mount["mountPath"]: volumes.get(mount["name"], {})
        for mount in container.get("volumeMounts", [])
        if not mount.get("readOnly")
    }
