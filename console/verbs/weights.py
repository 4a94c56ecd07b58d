"""`nyala weights`: the versions of a run, a check of them, and a copy of one."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from broker.protocol.messages import Publication
from broker.transport.keys import load_pair, make_client
from buffer import operations
from buffer.store import Store
from configs.errors import WeightsError
from configs.loader import load
from configs.secrets import redis_url
from console.command_line import AsJson, Run
from console.display.progress import naming_a_stop
from console.run.run_folder import run_folder_of
from learner.weights.log import read_weight_log

from .tables import ResultTable, print_facts

PULLER = "weights-pull"  # a key of its own, since that of an actor is in use

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Look at the weights that a run has published.\n\n"
    "Each version (lineage, step) is written down with its digest in weights.jsonl when it is "
    "sealed, and is never overwritten: a learner that restarts begins a new lineage.\n\n"
    "Example: `nyala weights log runs/demo`",
)


@app.command("log")
def show_log(
    run: Run,
    n: Annotated[int, typer.Option("-n", min=1, help="Most versions, the newest ones.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List versions with their digests and deliveries.

    Also how long each held the learner, and the share of weights that had changed.

    Example: `nyala weights log runs/demo -n 5`
    """
    print_facts(listed(run, n), as_json=as_json)


@app.command()
def verify(
    run: Run,
    file: Annotated[
        Path | None, typer.Option("--file", help="A file of `nyala weights pull`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check digests and order of versions.

    Each version has one digest, and steps increase; with --file, the bytes of a copy match too.

    Example: `nyala weights verify runs/demo --file policy.safetensors`
    """
    print_facts(verified(run, file), as_json=as_json)


@app.command()
def pull(
    run: Run,
    to: Annotated[Path, typer.Option("--to", help="Where to write the safetensors file.")],
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds.")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Copy the current weights out of a live run.

    Their digest is checked.

    Example: `nyala weights pull runs/demo --to policy.safetensors`
    """
    print_facts(pulled(run, to, timeout_s=timeout_s), as_json=as_json)


def listed(run: Path, n: int) -> ResultTable:
    """List the newest `n` versions, oldest first, each with its delivery.

    Raises:
        SettingsError: There is no such run.
    """
    versions: dict[tuple[int, int], dict[str, Any]] = {}
    for line in read_weight_log(run_folder_of(run).path):
        entry = versions.setdefault((line["version"][0], line["version"][1]), {})
        entry[line["event"]] = line
    rows = []
    for version, entry in list(versions.items())[-n:]:
        sealed, sent = entry.get("sealed", {}), entry.get("delivered", {})
        rows.append(
            {
                "version": f"{version[0]}.{version[1]}",
                "digest": sealed.get("digest", "")[:12],
                "bytes": sealed.get("num_bytes"),
                "learner held, s": sealed.get("held_s"),
                "actors": sent.get("actors"),
                "by group": sent.get("members"),
                "all confirmed": sent.get("is_complete"),
                "delivered in, s": round(sent["wall_s"], 4) if sent else None,
                "group bytes": sent.get("member_bytes"),
                "sparse bytes": sent.get("sparse_bytes"),
                "adapter bytes": sent.get("adapter_bytes"),
                "density": sent.get("density"),
            }
        )
    return ResultTable(f"{len(versions)} versions published", rows, {"versions": rows})


def verified(run: Path, file: Path | None) -> ResultTable:
    """Check the log of a run, and a file against it.

    Raises:
        SettingsError: There is no such run.
        WeightsError: A version was overwritten, steps go back, or the file is damaged or not of
            this run.
    """
    sealed = [
        line for line in read_weight_log(run_folder_of(run).path) if line["event"] == "sealed"
    ]
    digests: dict[tuple[int, int], str] = {}
    for line in sealed:
        version = line["version"][0], line["version"][1]
        if digests.setdefault(version, line["digest"]) != line["digest"]:
            raise WeightsError(
                f"version {version} must have one digest, got {digests[version]} and "
                f"{line['digest']}; two learners have written to this run: stop one of them, and "
                "begin again with --fresh"
            )
    for before, after in pairwise(digests):
        if after <= before:
            raise WeightsError(
                f"versions must increase, got {after} after {before} in weights.jsonl, which was "
                f"edited; restore it from a copy"
            )
    said = f"{len(digests)} versions, each with one digest, in order"
    if file is not None:
        said += f"; {_check_file(file, digests)}"
    return ResultTable(said, [], {"versions": len(digests), "verified": True})


def _check_file(file: Path, digests: dict[tuple[int, int], str]) -> str:
    from actors.weights.saved import read_weights  # noqa: PLC0415 - torch

    weights = read_weights(file)
    expected = digests.get((weights.version.lineage, weights.version.step))
    if expected != weights.actual:
        raise WeightsError(
            f"{file} must hold version {tuple(weights.version)} with digest "
            f"{expected or '(none in the log)'}, got {weights.actual}, so that it is damaged or of "
            f"another run; pull it again"
        )
    return f"{file} is version {weights.version.lineage}.{weights.version.step}"


def pulled(run: Path, to: Path, *, timeout_s: float) -> ResultTable:
    """Pull the current version of a live run into a file, under a key that is made for it.

    Raises:
        WeightsError: Nothing is published, or the bytes do not match their digest.
        DeadlineError: Nothing came in time.
        NyalaError: The run is stopped, or Redis does not answer.
    """
    from actors.weights.saved import download  # noqa: PLC0415 - torch

    folder = run_folder_of(run)
    settings = load(folder.config)
    with naming_a_stop(folder, settings):
        url = redis_url(settings.run, settings.buffer)
        with Store(url, run=settings.run.name) as store:
            announced = store.run(operations.publication())
    if announced is None:
        raise WeightsError(
            f"{run} must have published weights, got none; look at its learner with `nyala logs`"
        )
    publication = Publication(version=announced.version, **announced.fields)
    keys_folder = settings.broker.keys or folder.keys
    make_client(keys_folder, PULLER)
    keys = load_pair(keys_folder, PULLER)
    manifest = asyncio.run(
        download(publication, to, keys=keys, run=settings.run.name, timeout_s=timeout_s)
    )
    version = manifest.version
    return ResultTable(
        f"{to} holds version {version.lineage}.{version.step}, {manifest.num_bytes} bytes of "
        f"weights, digest {manifest.digest}",
        [],
        {"version": list(version), "digest": manifest.digest, "path": str(to)},
    )
