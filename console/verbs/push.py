"""`nyala push`: the trained model of a run on the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from configs.errors import SettingsError
from console.command_line import Run
from console.report.model_card import CARD, write_card
from console.run.checks.model import hub_is_away
from console.run.run_folder import RunFolder, RunState, run_folder_of, settings_of
from console.samples.try_command import Checkpoint, model_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi


# --------------------------------------------------------------------------------------------------
# Upload of a folder with a model to the Hugging Face hub, in one commit.

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
"""Ends of files that a model of fewer files would leave behind."""
LOGIN = "set HF_TOKEN to one, or run `hf auth login`"


def upload(
    model: Path,
    name: str,
    *,
    private: bool,
    revision: str | None,
    message: str,
    is_dry: bool = False,
) -> str:
    """Upload a model in one commit, so that its files appear together.

    Weights of an earlier upload are removed in the same commit.

    Args:
        model: Folder of the model.
        name: `OWNER/NAME` of the repository, which is made if it is missing.
        private: Make a new repository private.
        revision: Branch, which is made if it is missing; None = main.
        message: Message of the commit.
        is_dry: Change nothing, and describe what would be done.

    Returns:
        Address of the commit, or the description.

    Raises:
        SettingsError: The model cannot be uploaded.
    """
    from huggingface_hub import (  # noqa: PLC0415 - half a second
        CommitOperationAdd,
        CommitOperationDelete,
        HfApi,
        get_token,
    )

    files = _files(model)
    api = HfApi(library_name="nyala")
    if get_token() is None and not is_dry:
        raise SettingsError(
            f"a Hugging Face token with write access must be set, got none; {LOGIN}"
        )
    with _errors_of(api, name):
        if is_dry:
            away = f"no token: {LOGIN}" if get_token() is None else hub_is_away()
            return _plan(api, name, files, private=private, revision=revision, away=away)
        _make_repository(api, name, private=private, revision=revision)
        old = _left_over(api.list_repo_files(name, revision=revision), files)
        commit = api.create_commit(
            name,
            [
                *(CommitOperationAdd(path, file) for path, file in files.items()),
                *(CommitOperationDelete(path) for path in old),
            ],
            commit_message=message,
            revision=revision,
        )
    return str(commit.commit_url)


def _left_over(there: Iterable[str], files: Mapping[str, Path]) -> list[str]:
    """List the weights on the hub that a model of fewer files would leave behind."""
    return [path for path in there if path.endswith(WEIGHTS) and path not in files]


def _plan(
    api: HfApi,
    name: str,
    files: Mapping[str, Path],
    *,
    private: bool,
    revision: str | None,
    away: str,
) -> str:
    """Describe an upload: where it goes, files with their sizes, the card; nothing is changed.

    The hub is asked who we are and what is there, unless something keeps it away.
    """
    old: list[str] = []
    if away:
        seen = f"nothing was looked at on the hub ({away})"
    else:
        seen, old = _seen_on_hub(api, name, files, private=private, revision=revision)
    lines = [f"{name}, branch {revision or 'main'}; {seen}; nothing was uploaded"]
    sizes = {path: file.stat().st_size / 2**20 for path, file in files.items()}
    lines += [f"  {size:10.2f} MiB  {path}" for path, size in sizes.items()]
    lines += [f"  {'removed':>14}  {path}" for path in old]
    lines += [f"  {sum(sizes.values()):10.2f} MiB  in {len(sizes)} files"]
    lines += ["", f"{CARD}:", files[CARD].read_text(encoding="utf-8").rstrip()]
    return "\n".join(lines)


def _seen_on_hub(
    api: HfApi, name: str, files: Mapping[str, Path], *, private: bool, revision: str | None
) -> tuple[str, list[str]]:
    """Describe the repository and whose token it is; list the weights that would be removed."""
    from huggingface_hub.errors import RevisionNotFoundError  # noqa: PLC0415 - half a second

    who = api.whoami()
    if name.partition("/")[0] not in {
        who["name"],
        *(organization["name"] for organization in who["orgs"]),
    }:
        raise _refusal(name, 403, SettingsError())
    is_there = api.repo_exists(name)
    old: list[str] = []
    if is_there:
        _check_private(api, name, private=private)
        with suppress(RevisionNotFoundError):
            old = _left_over(api.list_repo_files(name, revision=revision), files)
    state = "is there" if is_there else f"is made as a {'private' if private else 'public'} model"
    return f"it {state}, as {who['name']}", old


def _files(model: Path) -> dict[str, Path]:
    """Return the name of each file in the folder -> its path, without hidden files."""
    paths = {str(path.relative_to(model)): path for path in sorted(model.rglob("*"))}
    return {
        name: path
        for name, path in paths.items()
        if path.is_file() and not any(part.startswith(".") for part in Path(name).parts)
    }


def _make_repository(api: HfApi, name: str, *, private: bool, revision: str | None) -> None:
    """Make repository and branch where they are missing.

    Raises:
        SettingsError: The repository is public, and a private one was asked for.
    """
    api.create_repo(name, private=True if private else None, exist_ok=True)
    _check_private(api, name, private=private)
    if revision is not None:
        api.create_branch(name, branch=revision, exist_ok=True)


def _check_private(api: HfApi, name: str, *, private: bool) -> None:
    """Refuse a public repository where a private one was asked for."""
    if private and not api.model_info(name).private:
        raise SettingsError(
            f"{name} must be private with --private, got one that everybody sees; make it private "
            f"on {api.endpoint}/{name}/settings, or choose another name"
        )


@contextmanager
def _errors_of(api: HfApi, name: str) -> Iterator[None]:
    """Turn errors of the hub into one sentence about the cause, with the next step."""
    from huggingface_hub.errors import (  # noqa: PLC0415 - half a second
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
    )
    from huggingface_hub.errors import HTTPError as HubError  # type: ignore[attr-defined] # noqa: PLC0415

    try:
        yield
    except HFValidationError as error:
        raise SettingsError(
            f"the name on the hub must be OWNER/NAME, got {name!r} ({error}); choose another name"
        ) from None
    except OfflineModeIsEnabled:
        raise SettingsError(
            f"HF_HUB_OFFLINE must not be set to upload {name}, got "
            f"{os.environ.get('HF_HUB_OFFLINE')}; unset it"
        ) from None
    except HfHubHTTPError as error:
        raise _refusal(name, error.response.status_code, error) from error
    except (HubError, OSError, RuntimeError, ValueError) as error:
        cause = error.__cause__ or error
        raise SettingsError(
            f"{api.endpoint} must take the files of {name}, got: {_first_line(cause)}; "
            f"try again: no file was changed there"
        ) from error


def _refusal(name: str, status: int, error: Exception) -> SettingsError:
    if status == 401:
        return SettingsError(f"the hub must know your token, got 401, Unauthorized; {LOGIN}")
    if status in (403, 404):
        return SettingsError(
            f"{name} must be yours to write to, got {status} from the hub; choose an owner whom "
            f"your token may write for (`hf auth whoami`), or another token"
        )
    return SettingsError(f"the hub must take {name}, got: {_first_line(error)}; try again")


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# --------------------------------------------------------------------------------------------------
# `nyala push`: the trained model of a run on the Hugging Face hub.

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def push(
    run: Run,
    name: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="Name of the model on the hub.")
    ],
    *,
    checkpoint: Checkpoint = None,
    private: Annotated[bool, typer.Option("--private", help="Only its owner may see it.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="BRANCH", help="A branch; else main.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show files, sizes and card, and change nothing."),
    ] = False,
) -> None:
    """Upload the trained model of a run to the Hugging Face hub.

    That of the end of the run, else of the newest checkpoint, with its model card. It is one
    commit, so nobody sees half of it. The token is that of HF_TOKEN or `hf auth login`.

    Example: `nyala push runs/demo me/speller --private`
    """
    if name.count("/") != 1 or not all(name.split("/")):
        raise typer.BadParameter(
            f"the name on the hub must be OWNER/NAME, got {name!r}; write it such as ana/math-1b"
        )
    folder = run_folder_of(run)
    _refuse_untrained(folder)
    settings = settings_of(folder.path)
    with model_of(settings, checkpoint) as model:
        path = Path(model.path)
        if not (path / CARD).exists():
            write_card(path, settings, model.step)
        where = upload(
            path,
            name,
            private=private,
            revision=revision,
            message=f"{settings.run.name}: {model.name}",
            is_dry=dry_run,
        )
    if dry_run:
        print(f"{model.name} of {settings.run.name} would go to {where}")
        return
    print(f"{model.name} of {settings.run.name} is at {where}")


def _refuse_untrained(folder: RunFolder) -> None:
    """Refuse to publish the model that a run begins with as a trained one.

    Raises:
        SettingsError: There is no trained model yet.
    """
    if folder.state is not RunState.FINISHED and folder.newest_checkpoint() is None:
        raise SettingsError(
            f"{folder.path} must have trained a model to upload, got a run without a checkpoint; "
            f"look at it with `nyala status {folder.path}`"
        )
