"""Key files: made once, private, and refused when they are not."""

from __future__ import annotations

import errno
import shutil
import stat
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from broker.transport.allow_list import TAG, AllowList, AllowListEntry, Role, read_allowed, revoke
from broker.transport.keys import load_pair, load_public, make_client, make_keys, read_key
from configs import durable
from configs.errors import SettingsError
from tests.broker.support.keys import keys_with_actor
from tests.learner.support.listening import without_files


def test_keys_are_private_and_made_once(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys")
    first = {name: load_pair(folder, name) for name in ("broker", "learner", "enrolment")}

    make_keys(folder)

    assert {name: load_pair(folder, name) for name in first} == first
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name, pair in first.items():
        assert stat.S_IMODE((folder / f"{name}.key").stat().st_mode) == 0o600
        assert load_public(folder, name) == pair.public
        assert pair.secret.decode() not in repr(pair)
    key = first["enrolment"].public
    assert read_allowed(folder) == {
        key: AllowListEntry("enrolment", Role.ENROLMENT, key.decode()[:TAG])
    }


class FailingDisk(durable.Disk):
    """Loses power at a rename."""

    def __init__(self, lives: int) -> None:
        self.lives = lives
        self.synced: list[Path] = []

    def rename(self, source: Path, target: Path) -> None:
        if not self.lives:
            raise OSError("no power")
        self.lives -= 1
        super().rename(source, target)

    def sync(self, path: Path) -> None:
        self.synced.append(path)
        super().sync(path)


@pytest.mark.parametrize("renames", range(3))
def test_a_pair_that_was_half_made_is_made_whole_and_let_in_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    folder = make_keys(tmp_path / "keys")
    with monkeypatch.context() as power:
        power.setattr(durable, "DISK", FailingDisk(renames))
        with pytest.raises(OSError, match="no power"):
            make_client(folder, "spot")
    assert not (folder / "spot.key").exists()

    make_client(folder, "spot")

    pair = load_pair(folder, "spot")
    assert pair.public == load_public(folder, "spot")
    assert {m.name for key, m in read_allowed(folder).items() if key == pair.public} == {"spot"}


def test_a_key_that_is_revoked_is_so_after_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = keys_with_actor(tmp_path / "keys")
    disk = FailingDisk(0)
    monkeypatch.setattr(durable, "DISK", disk)

    revoke(folder, "actor")

    assert folder / "allowed" / "actor" in disk.synced


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    folder = keys_with_actor(tmp_path / "keys")
    (folder / "actor.key").chmod(0o640)

    with pytest.raises(SettingsError, match=r"owner alone, got mode 0640.*chmod 600"):
        load_pair(folder, "actor")


def test_missing_and_malformed_keys_name_the_next_step(tmp_path: Path) -> None:
    folder = keys_with_actor(tmp_path / "keys")
    (folder / "broker.pub").unlink()
    (folder / "actor.key").write_text("too short")

    with pytest.raises(SettingsError, match=r"broker\.pub .*No such file.*nyala keys"):
        load_public(folder, "broker")
    with pytest.raises(SettingsError, match=r"actor\.key must hold a z85 key of 40 characters"):
        load_pair(folder, "actor")
    with pytest.raises(SettingsError, match=r"nyala keys"):
        load_pair(tmp_path / "elsewhere", "actor")


@pytest.mark.parametrize(
    ("digits", "got"),
    [("#" * 40, "40 bytes that"), ("0" * 39, "39 bytes;"), ("0" * 39 + "~", "z85;")],
)
def test_characters_that_are_no_key_are_refused(tmp_path: Path, digits: str, got: str) -> None:
    path = tmp_path / "actor.pub"
    path.write_text(digits)

    with pytest.raises(SettingsError, match=rf"actor\.pub must hold a z85 key.*{got}"):
        read_key(path)


def test_the_allow_list_follows_its_folder_and_fails_closed(tmp_path: Path) -> None:
    folder = keys_with_actor(tmp_path / "keys")
    allowed = AllowList(folder)
    actor = load_pair(folder, "actor").public

    assert allowed.member(actor) is None
    allowed.refresh()
    assert allowed.member(actor) == AllowListEntry("actor", Role.ACTOR, actor.decode()[:TAG])
    make_client(folder, "spot")
    allowed.refresh()
    assert allowed.role(load_pair(folder, "spot").public) is Role.ACTOR
    (folder / "allowed" / "actor" / "spot.pub").write_text("nonsense")
    allowed.refresh()
    assert allowed.member(load_pair(folder, "spot").public) is None
    shutil.rmtree(folder / "allowed")
    allowed.refresh()
    assert allowed.member(actor) is None


@pytest.mark.parametrize("are_listed", [False, True])
def test_a_process_without_files_left_revokes_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_listed: bool
) -> None:
    folder = keys_with_actor(tmp_path / "keys")
    allowed = AllowList(folder)
    allowed.refresh()
    make_client(folder, "spot")
    known = allowed.members()

    with monkeypatch.context() as patch, without_files() if not are_listed else nullcontext():
        if are_listed:  # connections took the last one since
            none = OSError(errno.EMFILE, "Too many open files")
            patch.setattr(Path, "read_bytes", Mock(side_effect=none))
        with pytest.raises(OSError, match="Too many open files"):
            allowed.refresh()

    assert allowed.members() is known
    allowed.refresh()
    assert {member.name for member in allowed.members().values()} == {"actor", "enrolment", "spot"}
