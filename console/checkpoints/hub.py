"""Upload of a folder with a model to the Hugging Face hub, in one commit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import SettingsError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
"""Ends of files that a model of fewer files would leave behind."""
LOGIN = "set HF_TOKEN to one, or run `hf auth login`"


def upload(model: Path, name: str, *, private: bool, revision: str | None, message: str) -> str:
    """Upload a model; nobody sees half of it.

    Weights of an earlier upload are removed in the same commit.

    Args:
        model: Its folder.
        name: `OWNER/NAME`; made if it is not there yet.
        private: Make it so that nobody else sees it.
        revision: A branch, made if it is not there yet; None = main.
        message: Of the commit.

    Returns:
        Where it is.

    Raises:
        SettingsError: It cannot be uploaded.
    """
    from huggingface_hub import (  # noqa: PLC0415 - half a second
        CommitOperationAdd,
        CommitOperationDelete,
        HfApi,
        get_token,
    )

    if get_token() is None:
        raise SettingsError(
            f"a token of the Hugging Face hub that may write must be there, got none; {LOGIN}"
        )
    api = HfApi(library_name="nyala")
    files = _files(model)
    with _errors_of(api, name):
        _make(api, name, private=private, revision=revision)
        there = api.list_repo_files(name, revision=revision)
        old = [path for path in there if path.endswith(WEIGHTS) and path not in files]
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


def _files(model: Path) -> dict[str, Path]:
    """Name of each file in the folder -> where it is; hidden ones are left out."""
    found = {str(path.relative_to(model)): path for path in sorted(model.rglob("*"))}
    return {
        name: path
        for name, path in found.items()
        if path.is_file() and not any(part.startswith(".") for part in Path(name).parts)
    }


def _make(api: HfApi, name: str, *, private: bool, revision: str | None) -> None:
    """Make repository and branch where they are missing.

    Raises:
        SettingsError: It is public, and a private one was asked for.
    """
    api.create_repo(name, private=True if private else None, exist_ok=True)
    if private and not api.model_info(name).private:
        raise SettingsError(
            f"{name} must be private with --private, got one that everybody sees; make it private "
            f"on {api.endpoint}/{name}/settings, or choose another name"
        )
    if revision is not None:
        api.create_branch(name, branch=revision, exist_ok=True)


@contextmanager
def _errors_of(api: HfApi, name: str) -> Iterator[None]:
    """Say in one sentence why an upload failed, and what to do."""
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
            f"the name on the hub must be OWNER/NAME, got {name!r}; {error}"
        ) from None
    except OfflineModeIsEnabled:
        raise SettingsError(
            f"the hub must be asked to upload {name}, got HF_HUB_OFFLINE="
            f"{os.environ.get('HF_HUB_OFFLINE')}; unset it"
        ) from None
    except HfHubHTTPError as error:
        raise _refusal(name, error.response.status_code, error) from error
    except (HubError, OSError, RuntimeError, ValueError) as error:
        cause = error.__cause__ or error
        raise SettingsError(
            f"{api.endpoint} must take the files of {name}, got {_line(cause)}; "
            f"nothing was changed there: try again"
        ) from error


def _refusal(name: str, status: int, error: Exception) -> SettingsError:
    if status == 401:
        return SettingsError(f"the hub must know your token, got 401, Unauthorized; {LOGIN}")
    if status in (403, 404):
        return SettingsError(
            f"{name} must be yours to write to, got {status} from the hub; choose an owner whom "
            f"your token may write for (`hf auth whoami`), or another token"
        )
    return SettingsError(f"the hub must take {name}, got {_line(error)}; try again")


def _line(error: BaseException) -> str:
    """The first line that an error says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
