"""Declarations of the model that a run began with, for the card of the one that it trained."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from configs.settings import RunSettings

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
LICENSE = ("license", "license_name", "license_link")
FRONT_MATTER = re.compile(r"\A\s*---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)


def declarations(run: RunSettings) -> dict[str, object]:
    """Return what a card repeats: `base_model`, and the license if the base declares one.

    A base on the hub is asked for its own card, from the cache where the hub cannot be reached. A
    folder is not named: it says of which model it is made, if it has a card.
    """
    if run.model == "init":
        return {}
    folder = Path(run.model).expanduser()
    if folder.is_dir():
        return _of(folder / "README.md", (*LICENSE, "base_model"))
    if not HUB_NAME.fullmatch(run.model):
        return {}
    return {"base_model": run.model} | _of(_card_on_the_hub(run.model), LICENSE)


def _card_on_the_hub(name: str) -> Path | None:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - half a second
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415
    from huggingface_hub.errors import HTTPError as HubError  # type: ignore[attr-defined] # noqa: PLC0415

    try:
        return Path(hf_hub_download(name, "README.md"))
    except (OSError, HubError, HFValidationError):
        return None  # a card without a license, rather than none


def _of(card: Path | None, keys: tuple[str, ...]) -> dict[str, object]:
    """Read keys of a card's front matter; none where there is none."""
    try:
        text = card.read_text(encoding="utf-8") if card is not None else ""
        found = yaml.safe_load(matter[1]) if (matter := FRONT_MATTER.match(text)) else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {key: found[key] for key in keys if key in found} if isinstance(found, dict) else {}
