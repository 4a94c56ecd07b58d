"""Recipes of a run: templates beside this file, filled in from the run's settings."""

from __future__ import annotations

import math
import re
from pathlib import Path
from string import Template
from typing import Literal

from broker.transport.keys import make_keys
from buffer.client.address import split_url, without_password
from configs.errors import SettingsError
from configs.fleet.wanted import first_wanted
from configs.loader import save
from configs.secrets import FILE_NAME, redis_url_of, write_secret
from configs.settings import Settings
from configs.weight_path import is_loopback, uses_groups
from console.run.own_files import with_value
from learner.checkpointing.manifest import run_key

Target = Literal["kubernetes", "slurm", "skypilot"]
NAMES = {"kubernetes": "Kubernetes", "slurm": "Slurm", "skypilot": "SkyPilot"}
EVERYWHERE = "tcp://0.0.0.0:5758"
AFTER_DRAIN_S = 35  # to take leave, and to end engine and rewards
CHECKOUT = Path(__file__).parents[2]
IN_POD = Path("/srv/nyala/runs")
PLAIN = re.compile(r"[\w@%+=:,./-]+")
"""A path that a shell reads as it is."""


class _Recipe(Template):
    delimiter = "@@"  # shells and kubelets have the dollar


def render(settings: Settings, target: Target, out: Path) -> list[Path]:
    """Write the recipes of a run into a folder, with its settings and keys; keys there are kept.

    Returns:
        The recipes, the one to begin with first.

    Raises:
        SettingsError: The target cannot run these settings.
    """
    out = out.absolute()
    if not PLAIN.fullmatch(str(out)):
        raise SettingsError(f"OUT must be a path without spaces and quotes, got {out}")
    _refuse_what_it_cannot_run(settings, target)
    settings = with_value(settings, "run", "directory", _directory(settings, target))
    values = _values(settings, out)
    out.mkdir(parents=True, exist_ok=True)
    make_keys(out / "keys")
    if target == "kubernetes" and settings.buffer.url is not None:
        url = redis_url_of() or settings.buffer.url
        write_secret(out / FILE_NAME, url)
        settings = with_value(settings, "buffer", "url", without_password(url))
    save(settings, out / "config.yaml")
    if target == "skypilot":
        run_key(out / "keys")
    written = []
    for name, text in _recipes(settings, target, values).items():
        path = out / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if path.suffix == ".sh" else 0o644)
        written.append(path)
    return sorted(written, key=lambda path: path.stem not in {"kustomization", "hub"})


def _refuse_what_it_cannot_run(settings: Settings, target: Target) -> None:
    if target == "kubernetes":
        _refuse_what_pods_cannot_have(settings)
    elif settings.fleet.learner_nodes > 1:
        raise SettingsError(
            f"fleet.learner_nodes must be 1 on {NAMES[target]}, got "
            f"{settings.fleet.learner_nodes}; start the learner on each machine yourself "
            f"(docs/parallelism.md)"
        )
    if target != "slurm" and settings.learner.broadcast:
        raise SettingsError(
            f"learner.broadcast must be null or false on {NAMES[target]}, got true; actors reach "
            f"the publisher by a name there, and process groups need its own address"
        )
    if target != "skypilot":
        return
    if settings.run.model == "init":
        raise SettingsError(
            "run.model must be a name on the hub, or a folder, on SkyPilot, got init; actors on "
            "other machines have no way to the hub's files: make it with `nyala init-model`, name "
            "its folder, and bring it to all machines with file_mounts"
        )
    if not (CHECKOUT / "run").exists():
        raise SettingsError(
            f"SkyPilot must be given a checkout of Nyala, got an installed package in {CHECKOUT}; "
            f"render with ./run fleet render"
        )


def _refuse_what_pods_cannot_have(settings: Settings) -> None:
    if settings.run.model == "init":
        raise SettingsError(
            "run.model must be a name on the hub, or a folder of the image, on Kubernetes, got "
            "init; actors in other pods have no way to the hub's files: copy the model into an "
            "image of yours, and name its folder"
        )
    if settings.actors.share_endpoint is not None:
        raise SettingsError(
            f"actors.share_endpoint must be null on Kubernetes, got "
            f"{settings.actors.share_endpoint}; the rendered NetworkPolicy lets no pod connect to "
            f"an actor, so that each would wait for its peers in vain"
        )
    url, nodes = settings.buffer.url, settings.fleet.learner_nodes
    if url is not None and is_loopback(f"tcp://{split_url(url).hostname or 'localhost'}:0"):
        raise SettingsError(
            f"buffer.url must be a Redis that pods reach, got {without_password(url)}; name a "
            f"Service, or leave it out for a Redis beside broker and learner"
        )
    if nodes > 1 and (url is None or not settings.run.trusted_network):
        raise SettingsError(
            f"fleet.learner_nodes must be 1 without both buffer.url and run.trusted_network, got "
            f"{nodes}; each node reads its episodes from a Redis that all reach, and whoever is on "
            f"their network can read and write weights (docs/parallelism.md)"
        )


def _recipes(settings: Settings, target: Target, values: dict[str, str | int]) -> dict[str, str]:
    """Fill the templates in; those of SkyPilot become one file, with as many actors as it has."""
    folder = Path(__file__).parent / target
    files = [*folder.glob("*.*")]
    if target == "kubernetes":
        files += (folder / ("hub" if settings.buffer.url is None else "parts")).iterdir()
    templates = {path.name: _Recipe(path.read_text(encoding="utf-8")) for path in files}
    if target != "skypilot":
        return {name: template.substitute(values) for name, template in templates.items()}
    jobs = [templates["hub.yaml"].substitute(values)]
    jobs += [
        templates["actor.yaml"].substitute(values, actor=number)
        for number in range(int(values["actors"]))
    ]
    return {"group.yaml": "".join(jobs)}


def _directory(settings: Settings, target: Target) -> Path:
    return IN_POD if target == "kubernetes" else settings.run.directory.absolute()


def _publisher_under_slurm(settings: Settings) -> str:
    """Name the publisher, for actors that pull; process groups use its own address."""
    everywhere = settings.learner.model_copy(update={"publisher_endpoint": EVERYWHERE})
    if uses_groups(settings.run, everywhere):
        return ""
    return ' --set "learner.advertise=$hub"'


def _values(settings: Settings, out: Path) -> dict[str, str | int]:
    fleet = settings.fleet
    return {
        "run": settings.run.name,
        "group": settings.run.name.replace(".", "-"),  # SkyPilot takes no dot
        "folder": str(settings.run.folder),
        "out": str(out),
        "checkout": str(CHECKOUT),
        "actors": first_wanted(settings).actors,
        "min_actors": fleet.min_actors,
        "max_actors": fleet.max_actors or settings.broker.max_actors,
        "last_actor": fleet.min_actors - 1,
        "grace": math.ceil(settings.actors.drain_s) + AFTER_DRAIN_S,
        "broker": "nyala-hub" if settings.buffer.url is None else "nyala-broker",
        "nodes": fleet.learner_nodes,
        "runs_access": "ReadWriteOnce" if fleet.learner_nodes == 1 else "ReadWriteMany",
        "publisher": _publisher_under_slurm(settings),
        "hub_gpus": settings.learner.ranks,
        "actor_gpus": settings.actors.tensor_parallel_size,
    }
