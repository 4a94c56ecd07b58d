"""Manifest of a checkpoint: the digests of its files, and a MAC under a key of the run.

Weights written by somebody else would decide what is trained. An HMAC-SHA256 of the digests proves
that this run wrote them. The key lies in the run's folder, outside `checkpoints/`: a copied folder
of checkpoints has no key with it. Only rank 0 reads the key, writes manifests and checks them.
"""

from __future__ import annotations

import hmac
import json
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from configs.errors import CheckpointError
from configs.secrets import write_secret

MANIFEST = "manifest.json"
KEY = "checkpoint.key"
KEY_BYTES = 32
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors of taking JSON of another shape apart."""


class ForeignCheckpoint(CheckpointError):
    """A checkpoint that this run did not write, or whose manifest was changed."""


DIGESTS = "blake3"


class Manifest(NamedTuple):
    """The contents of a checkpoint's `manifest.json`."""

    digests: dict[str, str]
    """BLAKE3 of each file, by name."""
    mac: str | None
    """MAC of the digests; None where the checkpoint was written without one."""


def run_key(run_folder: Path) -> bytes:
    """Read the key of a run, or make it.

    Raises:
        CheckpointError: The key is malformed, or others can read it.
    """
    file = run_folder / KEY
    if not file.exists():
        write_secret(file, secrets.token_hex(KEY_BYTES))
    mode = stat.S_IMODE(file.stat().st_mode)
    try:
        key = bytes.fromhex(file.read_text(encoding="utf-8"))
    except ValueError:
        key = b""
    if mode & 0o077:
        raise CheckpointError(
            f"{file} must be readable by its owner alone, got mode {mode:04o}; `chmod 600 {file}` "
            "if nobody else has read it, or remove it: the next start then asks you to trust a "
            "checkpoint by name"
        )
    if len(key) != KEY_BYTES:
        raise CheckpointError(
            f"{file} must hold {KEY_BYTES} bytes in hexadecimal, got {len(key)} that can be read; "
            "restore it from a copy, or remove it: the next start then asks you to trust a "
            "checkpoint by name"
        )
    return key


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: There is no manifest, or it is malformed.
    """
    try:
        tree = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        digests = {str(name): str(digest) for name, digest in tree[DIGESTS].items()}
        return Manifest(digests, str(tree["mac"]) if "mac" in tree else None)
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(
            f"{path / MANIFEST} must be a manifest that can be read, got {type(error).__name__}: "
            f"{error}; restore it from a copy, or use another checkpoint"
        ) from error


def encode_manifest(digests: Mapping[str, str], key: bytes) -> bytes:
    """Encode a manifest with the MAC of this run, as JSON."""
    return json.dumps({DIGESTS: digests, "mac": _mac(digests, key)}, indent=1).encode()


def refuse_foreign(path: Path, manifest: Manifest, key: bytes) -> None:
    """Refuse a checkpoint that this run did not write, before the rest of it is read.

    Raises:
        ForeignCheckpoint: The manifest has no MAC, or a wrong one.
    """
    if _is_vouched_for(manifest, key):
        return
    raise ForeignCheckpoint(
        f"{path} must have been written by this run, got a manifest with "
        f"{'another' if manifest.mac else 'no'} MAC, as one of another run has; its weights decide "
        f"what is trained: if you trust it, start with --trust-checkpoint {path.name}, else remove "
        f"it"
    )


def is_own(path: Path, key: bytes) -> bool:
    """Return whether this run wrote the manifest of a checkpoint; False if it cannot be read."""
    try:
        return _is_vouched_for(read_manifest(path), key)
    except CheckpointError:
        return False


def _is_vouched_for(manifest: Manifest, key: bytes) -> bool:
    mac = manifest.mac or ""
    return hmac.compare_digest(mac.encode(), _mac(manifest.digests, key).encode())


def _mac(digests: Mapping[str, str], key: bytes) -> str:
    text = json.dumps(digests, sort_keys=True, separators=(",", ":"))
    return hmac.digest(key, text.encode(), "sha256").hex()
