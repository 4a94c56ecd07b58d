"""`nyala fleet`: recipes for schedulers, and jobs by the number of actors that a run wants."""

from __future__ import annotations

import getpass
import math
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Annotated, Literal

import typer

from broker.transport.keys import make_keys
from buffer.client.address import split_url, without_password
from configs.errors import SettingsError
from configs.fleet import first_wanted
from configs.loader import load, save
from configs.secrets import FILE_NAME, redis_url_of, write_secret
from configs.settings import Settings
from configs.weight_path import is_loopback, uses_groups
from console.display.progress import RunProgress
from console.run.run_folder import RunFolder, RunState, run_folder_of
from console.run.user_files import with_value
from learner.checkpointing.manifest import run_key

# --------------------------------------------------------------------------------------------------
# Recipes of a run: templates beside this file, filled in from the run's settings.

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
    """Write the recipes of a run into a folder, with its settings and keys.

    Keys that are there are kept; recipes and settings are replaced.

    Returns:
        The recipes, the one to begin with first.

    Raises:
        SettingsError: The target cannot run these settings, or `out` has a space or a quote.
    """
    out = out.absolute()
    if not PLAIN.fullmatch(str(out)):
        raise SettingsError(
            f"OUT must be a path without spaces and quotes, got {out}; choose another"
        )
    _refuse_what_it_cannot_run(settings, target)
    settings = with_value(settings, "run", "directory", _directory(settings, target))
    values = _template_values(settings, out)
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
            f"learner.broadcast must be null or false on {NAMES[target]}, where actors know the "
            f"publisher by a name and process groups need its own address, got true; set it to null"
        )
    if target != "skypilot":
        return
    if settings.run.model == "init":
        raise SettingsError(
            "run.model must be a name on the Hugging Face hub, or a folder, on SkyPilot, got init; "
            "make the model with `nyala init-model`, set run.model to its folder, and bring that "
            "to all machines with file_mounts"
        )
    if not (CHECKOUT / "run").exists():
        raise SettingsError(
            f"SkyPilot must be given a checkout of Nyala, got an installed package in {CHECKOUT}; "
            f"render with ./run fleet render"
        )


def _refuse_what_pods_cannot_have(settings: Settings) -> None:
    if settings.run.model == "init":
        raise SettingsError(
            "run.model must be a name on the Hugging Face hub, or a folder of the image, on "
            "Kubernetes, got init; make the model with `nyala init-model`, copy it into an image "
            "of yours, and set run.model to its folder there"
        )
    if settings.actors.share_endpoint is not None:
        raise SettingsError(
            f"actors.share_endpoint must be null on Kubernetes, where the rendered NetworkPolicy "
            f"lets no pod connect to an actor, got {settings.actors.share_endpoint}; set it to null"
        )
    url, nodes = settings.buffer.url, settings.fleet.learner_nodes
    if url is not None and is_loopback(f"tcp://{split_url(url).hostname or 'localhost'}:0"):
        raise SettingsError(
            f"buffer.url must be a Redis that pods reach, got {without_password(url)}; name a "
            f"Service, or leave it out for a Redis beside broker and learner"
        )
    if nodes > 1 and (url is None or not settings.run.trusted_network):
        raise SettingsError(
            f"fleet.learner_nodes must be 1 unless buffer.url and run.trusted_network are set, got "
            f"{nodes}; set it to 1, or set both: buffer.url to a Redis that all nodes reach, and "
            f"run.trusted_network if all on their network may read and write weights "
            f"(docs/parallelism.md)"
        )


def _recipes(settings: Settings, target: Target, values: dict[str, str | int]) -> dict[str, str]:
    """Fill in the templates; those of SkyPilot become one file, with all of its actors."""
    folder = Path(__file__).parents[1] / "fleet" / target
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


def _template_values(settings: Settings, out: Path) -> dict[str, str | int]:
    """Return name -> value of what the templates leave open."""
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


# --------------------------------------------------------------------------------------------------
# Slurm jobs of actors, kept at the number that the run wants.

LOOK_S = 30.0
MOST_AT_ONCE = 32  # jobs: a number that was wrong for a moment costs no more
ASK_S = 60.0  # a controller that is busy answers late
MOST_FAILURES = 20  # in a row, which is ten minutes: a controller that is restarted is back by then


class SlurmFleet:
    """The actors' jobs of one run; Slurm's queue is their only record.

    Args:
        folder: Folder of the run.
        script: `actor.sh`, as `nyala fleet render` writes it.
        options: Options of sbatch, such as `--partition=spot`.
        pause: Waits between two looks; its argument is in seconds.
    """

    def __init__(
        self,
        folder: RunFolder,
        script: Path,
        options: Sequence[str],
        *,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pause = pause
        settings = load(folder.config)
        self._folder, self._script, self._options = folder, script, options
        self._name = f"nyala-actor-{settings.run.name}"
        self._progress = RunProgress(folder, steps=settings.run.steps)
        self._first = first_wanted(settings)

    def follow(self) -> None:
        """Adjust the number of jobs until the run has ended; its actors then end by themselves.

        Raises:
            SettingsError: Slurm refuses the first commands, or all for ten minutes.
        """
        failures = MOST_FAILURES
        while self._folder.state is not RunState.FINISHED:
            try:
                self.adjust_jobs()
                failures = 0
            except SettingsError as error:
                failures += 1
                if failures > MOST_FAILURES:
                    raise
                print(error, flush=True)
            self._pause(LOOK_S)

    def adjust_jobs(self) -> None:
        """Start missing jobs, or end those that are too many, at most `MOST_AT_ONCE` (32).

        Raises:
            SettingsError: Slurm does not answer within a minute, or refuses.
        """
        progress = self._progress.read_progress()
        wanted = progress.actors_wanted or self._first.actors
        jobs = self._jobs()
        missing = wanted - len(jobs)
        if not missing:
            return
        why = progress.actors_wanted_why or self._first.reason
        print(f"{why}: {wanted} wanted, {len(jobs)} jobs", flush=True)
        for _ in range(min(missing, MOST_AT_ONCE)):
            _run("sbatch", f"--job-name={self._name}", *self._options, str(self._script))
        if missing < 0:
            _run("scancel", *jobs[: min(-missing, MOST_AT_ONCE)])

    def _jobs(self) -> list[str]:
        """List the jobs that wait or run: waiting ones first, then the newest."""
        asked = _run(
            *("squeue", "-h", "-r", f"--name={self._name}", f"--user={getpass.getuser()}"),
            *("--states=PENDING,CONFIGURING,RUNNING", "--sort=T,-i", "-o", "%i"),
        )
        return asked.split()


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(
            f"Slurm's {command[0]} must answer within {ASK_S:g} s, got: {error}; run `nyala fleet "
            f"follow` on a machine with Slurm's commands, and look with `sinfo` whether its "
            f"controller answers"
        ) from None
    if done.returncode:
        raise SettingsError(
            f"Slurm's {command[0]} must succeed, got: {done.stderr.strip()[:500]}; change what it "
            f"refuses, such as --partition"
        )
    return done.stdout


# --------------------------------------------------------------------------------------------------
# `nyala fleet`: recipes for schedulers, and jobs by the number of actors that a run wants.

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Write recipes for Kubernetes, Slurm or SkyPilot, and follow the number of actors.\n\n"
    "Example: `nyala fleet render mine.yaml k8s --to kubernetes`",
)


@app.command("render")
def write_recipes(
    config: Annotated[
        Path, typer.Argument(metavar="RUN|CONFIG", help="A run's folder, or its settings.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the recipes, with the run's keys.")],
    to: Annotated[Target, typer.Option(help="The scheduler.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change a setting; repeatable."),
    ] = None,
) -> None:
    """Write the recipes of a run: hub, actors, and how many of them.

    The first file's head has the commands. Keys that are there already are kept.

    Example: `nyala fleet render mine.yaml k8s --to kubernetes`
    """
    file = config / "config.yaml" if config.is_dir() else config
    for path in render(load(file, overrides or [], finds_files=False), to, out):
        print(path)


@app.command()
def follow(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    script: Annotated[Path, typer.Argument(help="actor.sh, as `nyala fleet render` writes it.")],
    partition: Annotated[str, typer.Option(help="Partition of Slurm whose jobs may be preempted.")],
) -> None:
    """Keep as many actors' jobs under Slurm as the run wants, until it has ended.

    Runs where sbatch does; may be ended and started again at any time.

    Example: `nyala fleet follow runs/mine slurm/actor.sh --partition spot`
    """
    SlurmFleet(run_folder_of(run), script, [f"--partition={partition}"]).follow()
