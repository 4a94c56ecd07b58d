"""Join-packs: what is in them, what unpacks, and what is refused."""

from __future__ import annotations

import errno
import io
import shutil
import stat
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker.transport.allow_list import Role, read_allowed
from broker.transport.keys import load_pair, load_public
from configs.errors import SettingsError
from configs.loader import load, save
from configs.settings import BrokerSettings, LearnerSettings, RunSettings, Settings
from console.main import app
from console.run.plan import prepare
from console.run.run_folder import RunFolder, settings_of
from console.verbs.join_pack import is_pack, open_pack, write_pack

REWARD = "def score(completion, answer):\n    return float(completion == answer)\n"
OPEN = "tcp://0.0.0.0:5757"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that listens for other machines, as `nyala up` leaves it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return begin(tmp_path)


def begin(place: Path, *, endpoint: str = OPEN, publisher: str = OPEN, model: str = "init") -> Path:
    reward = place / "reward.py"
    reward.write_text(REWARD)
    settings = Settings(
        run=RunSettings(
            name="demo",
            directory=place / "runs",
            model=model,
            environment="calculator",
            reward=f"{reward}:score",
        ),
        broker=BrokerSettings(endpoint=endpoint),
        learner=LearnerSettings(publisher_endpoint=publisher),
    )
    folder = RunFolder(settings.run.folder)
    prepare(settings, folder, redis_url="redis://:secret@127.0.0.1:1/0")
    folder.init.mkdir()
    (folder.init / "config.json").write_text("{}")
    return folder.path


def pack(run: Path, out: Path, *, host: str = "10.1.2.3", with_model: bool = True) -> Path:
    write_pack(run, host, out.stem, out, with_model=with_model)
    return out


def test_a_pack_has_what_an_actor_needs_and_no_other_secret(run: Path, tmp_path: Path) -> None:
    file = pack(run, tmp_path / "site.nyala")

    with tarfile.open(file) as archive:
        names = {member.name for member in archive if member.isfile()}
        contents = b"".join(archive.extractfile(name).read() for name in names)  # type: ignore[union-attr]
    assert names == {
        "pack.json",
        "demo/config.yaml",
        "demo/keys/broker.pub",
        "demo/keys/enrolment.key",
        "demo/init/config.json",
    }
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for other in ("broker", "learner", "enrolment"):
        assert load_pair(run / "keys", other).secret not in contents
    assert b"secret@" not in contents
    assert not (run / "keys" / "site.key").exists()


def test_what_unpacks_is_a_run_that_its_actors_reach(run: Path, tmp_path: Path) -> None:
    file = pack(run, tmp_path / "site.nyala", host="2001:db8::7")
    assert is_pack(file)
    assert not is_pack(run)
    assert not is_pack(run / "config.yaml")

    folder, overrides = open_pack(file, ["actors.threads=2"])

    settings = settings_of(folder, overrides)
    assert settings.broker.endpoint == "tcp://[2001:db8::7]:5757"
    assert settings.actors.threads == 2
    assert settings.run.folder == folder
    assert Path(settings.run.model_path, "config.json").is_file()
    key = load_pair(folder / "keys", "enrolment").public
    assert read_allowed(run / "keys")[key].role is Role.ENROLMENT
    assert read_allowed(run / "keys")[key].name == "site"
    assert load_public(folder / "keys", "broker") == load_public(run / "keys", "broker")
    assert stat.S_IMODE((folder / "keys" / "enrolment.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700

    (folder / "config.yaml").touch()
    assert open_pack(file, ["actors.threads=2"]) == (folder, overrides)


def test_addresses_of_all_of_this_machine_and_the_place_of_keys_are_those_of_others(
    run: Path, tmp_path: Path
) -> None:
    keys = (run / "keys").rename(tmp_path / "keys")
    settings = load(run / "config.yaml")
    others = ("tcp://*:5758", "tcp://10.9.9.9:5757")
    own = settings.broker.model_copy(update={"keys": keys, "other_endpoints": others})
    save(settings.model_copy(update={"broker": own}), run / "config.yaml")

    folder, overrides = open_pack(pack(run, tmp_path / "site.nyala", host="hub"), [])

    broker = settings_of(folder, overrides).broker
    assert broker.endpoint == "tcp://hub:5757"
    assert broker.other_endpoints == ("tcp://hub:5758", "tcp://10.9.9.9:5757")
    assert broker.keys is None


def test_a_model_that_is_a_folder_comes_along_unless_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "own"
    model.mkdir()
    (model / "config.json").write_text("{}")
    run = begin(tmp_path, model=str(model))

    whole, overrides = open_pack(pack(run, tmp_path / "whole.nyala"), [])
    _, nothing = open_pack(pack(run, tmp_path / "less.nyala", with_model=False), [])

    assert (whole / "model" / "config.json").is_file()
    assert overrides[0].startswith("run.model=")
    assert nothing == []


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        (
            {"endpoint": "tcp://127.0.0.1:41000"},
            r"broker\.endpoint must be reachable from other .*, got .*1:41000; start .*0:41000$",
        ),
        ({"endpoint": "tcp://localhost:5757"}, r"broker\.endpoint must be reachable"),
        (
            {"publisher": "tcp://127.0.0.1:0"},
            r"learner\.publisher_endpoint must be reachable .*=tcp://0\.0\.0\.0:5758",
        ),
    ],
)
def test_a_run_that_nobody_reaches_is_refused(
    tmp_path: Path, changes: dict[str, str], answer: str
) -> None:
    run = begin(tmp_path, **changes)
    allowed = read_allowed(run / "keys")

    with pytest.raises(SettingsError, match=answer):
        pack(run, tmp_path / "site.nyala")

    assert read_allowed(run / "keys") == allowed
    assert not (tmp_path / "site.nyala").exists()
    assert pack(run, tmp_path / "tunnel.nyala", host="localhost").is_file()


@pytest.mark.parametrize("host", ["", "10.0.0.1:5757", "tcp://10.0.0.1", "hub:5757"])
def test_a_host_with_more_than_its_name_is_refused(run: Path, tmp_path: Path, host: str) -> None:
    with pytest.raises(SettingsError, match=r"--host must be the address or name"):
        pack(run, tmp_path / "site.nyala", host=host)


def test_a_pack_that_cannot_be_written_leaves_no_key(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "add", fill_up)
    with pytest.raises(OSError, match="No space left"):
        pack(run, tmp_path / "site.nyala")

    assert not (tmp_path / "site.nyala").exists()
    assert "site" not in {each.name for each in read_allowed(run / "keys").values()}


def test_no_file_is_overwritten_and_none_is_written_without_a_model(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "site.nyala").write_text("mine")
    with pytest.raises(SettingsError, match="--out must be a new file"):
        pack(run, tmp_path / "site.nyala")
    with pytest.raises(SettingsError, match="--out must be in a folder that exists"):
        pack(run, tmp_path / "nowhere" / "late.nyala")

    assert (tmp_path / "site.nyala").read_text() == "mine"
    assert not {"site", "late"} & {each.name for each in read_allowed(run / "keys").values()}
    shutil.rmtree(run / "init")
    with pytest.raises(SettingsError, match=r"run\.model must have been made"):
        pack(run, tmp_path / "early.nyala")


def test_another_reward_is_named_before_anything_is_loaded(run: Path, tmp_path: Path) -> None:
    file = pack(run, tmp_path / "site.nyala")
    (tmp_path / "reward.py").write_text(REWARD + "# changed\n")

    with pytest.raises(
        SettingsError, match=r"^reward on this machine must be as on the run's machine"
    ):
        open_pack(file, [])
    (tmp_path / "reward.py").write_text(REWARD)
    with pytest.raises(
        SettingsError, match=r"settings on this machine must be as on the run's machine"
    ):
        open_pack(file, ["run.temperature=0.5"])


def test_a_pack_that_others_can_read_or_that_is_damaged_is_refused(
    run: Path, tmp_path: Path
) -> None:
    file = pack(run, tmp_path / "site.nyala")
    file.chmod(0o644)
    with pytest.raises(SettingsError, match="must be readable by its owner alone, got mode 0644"):
        open_pack(file, [])

    file.chmod(0o600)
    with file.open("r+b") as opened:
        opened.truncate(2000)
    with pytest.raises(
        SettingsError, match="must be a pack that `nyala join-pack` of this version"
    ):
        open_pack(file, [])
    assert not list((tmp_path / "cache" / "nyala").iterdir())


@pytest.mark.parametrize("name", ["../outside", "/outside", "demo/../../outside", "link"])
def test_nothing_is_unpacked_beside_the_folder_of_a_pack(
    run: Path, tmp_path: Path, name: str
) -> None:
    file = pack(run, tmp_path / "site.nyala")
    member = tarfile.TarInfo(name)
    if name == "link":
        member.type, member.linkname = tarfile.SYMTYPE, "/outside"
    with tarfile.open(file, "a") as archive:
        archive.addfile(member, io.BytesIO())

    with pytest.raises(SettingsError, match=f"got: {name}, which no such file has"):
        open_pack(file, [])
    assert not list((tmp_path / "cache" / "nyala").iterdir())


def test_of_a_model_whose_files_are_links_the_files_come_along(run: Path, tmp_path: Path) -> None:
    blob = (run / "init" / "config.json").rename(tmp_path / "blob")
    (run / "init" / "config.json").symlink_to(blob)

    folder, _ = open_pack(pack(run, tmp_path / "site.nyala"), [])

    unpacked = folder / "init" / "config.json"
    assert not unpacked.is_symlink()
    assert unpacked.read_text() == "{}"


def test_the_verb_names_the_file_and_how_to_revoke_it(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["join-pack", str(run), "--host", "hub", "--name", "site"])

    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0] == "site.nyala"
    revoke = done.output.splitlines()[1].partition("nyala ")[2].split()
    assert CliRunner().invoke(app, revoke).exit_code == 0
    assert "site" not in {each.name for each in read_allowed(run / "keys").values()}
    assert load(run / "config.yaml").broker.endpoint == OPEN
