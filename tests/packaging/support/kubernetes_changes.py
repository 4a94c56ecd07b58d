"""Mistakes for the recipes for Kubernetes, and their commands as plain processes."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.broker.support.mounted_secret import mount
from tests.packaging.support.kubernetes_recipes import Recipes

Change = Callable[[Recipes], object]


def container(recipes: Recipes, name: str) -> dict[str, Any]:
    found: dict[str, Any] = recipes.pod(name)["containers"][0]
    return found


def without(name: str, word: str) -> Change:
    """Take the arguments out that begin so."""

    def change(recipes: Recipes) -> None:
        own = container(recipes, name)
        own["command"] = [each for each in own["command"] if not each.startswith(word)]

    return change


def replaced(name: str, old: str, new: str) -> Change:
    def change(recipes: Recipes) -> None:
        own = container(recipes, name)
        own["command"] = [each.replace(old, new) for each in own["command"]]

    return change


def without_volume(name: str, volume: str) -> Change:
    def change(recipes: Recipes) -> None:
        pod = recipes.pod(name)
        pod["volumes"] = [each for each in pod["volumes"] if each["name"] != volume]

    return change


def without_mount(name: str, place: str) -> Change:
    def change(recipes: Recipes) -> None:
        own = container(recipes, name)
        own["volumeMounts"] = [each for each in own["volumeMounts"] if each["mountPath"] != place]

    return change


def volume(recipes: Recipes, name: str, volume: str) -> dict[str, Any]:
    found: dict[str, Any] = next(v for v in recipes.pod(name)["volumes"] if v["name"] == volume)
    return found


def mounted(tmp_path: Path, recipes: Recipes, name: str) -> Path:
    """A Secret's files as a kubelet mounts them."""
    (generator,) = [
        each for each in recipes.kustomization["secretGenerator"] if each["name"] == name
    ]
    is_root = os.geteuid() == 0
    return mount(
        tmp_path / name,
        [recipes.folder / file for file in generator["files"]],
        owner=0 if is_root else -1,
        group=os.getegid() if is_root else -1,
        mode=0o440 if is_root else 0o400,
    )


def moved(words: list[str], places: dict[str, Path]) -> list[str]:
    """Put our folders where the container has mounts."""
    pattern = "|".join(sorted(places, key=len, reverse=True))
    return [re.sub(rf"({pattern})\b", lambda match: str(places[match[1]]), each) for each in words]
