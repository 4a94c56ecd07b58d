"""`nyala cache`: compiled code, from one machine to another of its kind and to no other."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from configs.errors import SettingsError
from configs.machine import COMPILED
from console.main import app
from console.verbs import cache
from console.verbs.cache import differences, kind_of_machine, pack, unpack
from tests.needs import needs

KIND = {
    "torch": "2.13.0",
    "vLLM": "0.32.0",
    "Triton": "3.7.1",
    "Python": "3.12",
    "system": "Linux x86_64 glibc 2.36",
    "GPU": "NVIDIA H200, 9.0",
    "instructions": "avx avx2",
}


class Machine:
    """A machine as the verb sees it: a folder of caches of its own."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled = home / "nyala" / "compile"
        self._home, self._monkeypatch = home, monkeypatch

    def enter(self) -> Path:
        for variable in COMPILED:
            self._monkeypatch.delenv(variable, raising=False)
        self._monkeypatch.setenv("XDG_CACHE_HOME", str(self._home))
        return self.compiled

    def write(self, name: str, text: str = "code") -> Path:
        path = self.compiled / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    @property
    def files(self) -> dict[str, str]:
        paths = [path for path in self.compiled.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.compiled)): path.read_text() for path in paths}


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "old", monkeypatch)


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "new", monkeypatch)


def packed(old: Machine, file: Path, kind: dict[str, str] = KIND) -> Path:
    old.enter()
    pack(file, kind)
    return file


def test_another_machine_has_what_was_compiled_and_keeps_its_own(
    old: Machine, new: Machine, tmp_path: Path
) -> None:
    old.write("vllm/torch_compile_cache/1/model", "theirs")
    old.write("inductor/ab/cab.so", "theirs")
    old.write("triton/KEY/kernel.cubin", "theirs")
    new.write("inductor/ab/cab.so", "its own")
    file = packed(old, tmp_path / "code.tar.gz")

    new.enter()

    assert unpack(file, KIND) == 2
    assert new.files == {
        "vllm/torch_compile_cache/1/model": "theirs",
        "inductor/ab/cab.so": "its own",
        "triton/KEY/kernel.cubin": "theirs",
    }
    assert unpack(file, KIND) == 0


def test_folders_that_variables_name_are_packed_and_filled(
    old: Machine, new: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old.enter()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kernel").write_text("code")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    pack(tmp_path / "code.tar.gz", KIND)

    new.enter()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "yours"))
    unpack(tmp_path / "code.tar.gz", KIND)

    assert (tmp_path / "yours" / "kernel").read_text() == "code"
    assert new.files == {}


def test_what_belongs_to_one_machine_or_is_being_written_stays_there(
    old: Machine, new: Machine, tmp_path: Path
) -> None:
    old.write("vllm/torch_compile_cache/1/model")
    old.write("vllm/torch_compile_cache/1/model.12.tmp")
    old.write("vllm/gpu_p2p_access_cache_for_0,1.json")
    old.write("vllm/assets/picture.png")
    old.write("inductor/locks/ab.lock")
    (old.compiled / "inductor" / "link").symlink_to("/etc/passwd")
    file = packed(old, tmp_path / "code.tar.gz")

    new.enter()
    unpack(file, KIND)

    assert [*new.files] == ["vllm/torch_compile_cache/1/model"]


def test_groups_of_triton_name_the_files_where_they_are_now(
    old: Machine, new: Machine, tmp_path: Path
) -> None:
    names = ["kernel.json", "kernel.cubin"]
    group = {name: str(old.write(f"triton/KEY/{name}")) for name in names}
    old.write("triton/KEY/__grp__kernel.json", json.dumps({"child_paths": group}))
    file = packed(old, tmp_path / "code.tar.gz")

    new.enter()
    unpack(file, KIND)

    place = new.compiled / "triton" / "KEY"
    paths = json.loads((place / "__grp__kernel.json").read_text())["child_paths"]
    assert paths == {name: str(place / name) for name in names}


@needs("Triton")
def test_triton_finds_a_group_that_was_carried(old: Machine, new: Machine, tmp_path: Path) -> None:
    triton = import_module("triton.runtime.cache")

    def cache_of(machine: Machine) -> Any:
        machine._monkeypatch.setenv("TRITON_CACHE_DIR", str(machine.enter() / "triton"))
        return triton.FileCacheManager("KEY")

    made = cache_of(old)
    made.put_group("kernel.json", {"kernel.cubin": made.put(b"code", "kernel.cubin")})
    file = packed(old, tmp_path / "code.tar.gz")
    new.enter()
    unpack(file, KIND)
    shutil.rmtree(old.compiled)

    found = cache_of(new).get_group("kernel.json")

    assert found == {"kernel.cubin": str(new.compiled / "triton" / "KEY" / "kernel.cubin")}


@pytest.mark.parametrize("fact", [fact for fact in KIND if fact != "instructions"])
def test_code_for_another_kind_of_machine_is_refused_with_both_values(
    old: Machine, new: Machine, tmp_path: Path, fact: str
) -> None:
    old.write("triton/KEY/kernel.cubin")
    file = packed(old, tmp_path / "code.tar.gz", KIND | {fact: "theirs"})
    new.enter()

    got = (
        f"{file} for {fact} theirs where this machine has {KIND[fact]}; pack one on a machine like"
    )
    with pytest.raises(SettingsError, match=f"^FILE must be compiled on .* got {re.escape(got)}"):
        unpack(file, KIND)
    assert new.files == {}


def test_code_for_a_processor_asks_for_its_instructions_alone() -> None:
    more = KIND | {"instructions": "avx avx2 avx512f"}

    assert differences(KIND, more) == []
    assert differences(more, KIND) == ["instructions avx512f where this processor has avx avx2"]


def test_code_for_a_card_runs_beside_any_processor(
    old: Machine, new: Machine, tmp_path: Path
) -> None:
    old.write("triton/KEY/kernel.cubin")
    card = packed(old, tmp_path / "card.tar.gz", KIND | {"instructions": "amx"})
    old.write("inductor/ab/cab.cpp")
    both = packed(old, tmp_path / "both.tar.gz", KIND | {"instructions": "amx"})
    new.enter()

    assert unpack(card, KIND) == 1
    with pytest.raises(SettingsError, match="instructions amx where this processor has avx avx2"):
        unpack(both, KIND)


def changed(file: Path, *members: tarfile.TarInfo, kind: object = None) -> Path:
    """Write an archive as an attacker may."""
    head = json.dumps(kind or {"format": cache.FORMAT, "kind": KIND}).encode()
    first = tarfile.TarInfo(cache.KIND)
    first.size = len(head)
    with tarfile.open(file, "w:gz") as archive:
        archive.addfile(first, io.BytesIO(head))
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return file


def linked(name: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member


@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo("../outside"),
        tarfile.TarInfo("/outside"),
        tarfile.TarInfo("triton/../../outside"),
        tarfile.TarInfo("elsewhere/file"),
        tarfile.TarInfo("."),
        linked("triton/link", tarfile.SYMTYPE),
        linked("triton/link", tarfile.LNKTYPE),
        linked("triton/device", tarfile.CHRTYPE),
    ],
    ids=lambda member: member.name,
)
def test_nothing_is_unpacked_beside_the_folders(
    new: Machine, tmp_path: Path, member: tarfile.TarInfo
) -> None:
    file = changed(tmp_path / "code.tar.gz", tarfile.TarInfo("triton/first"), member)
    new.enter()

    with pytest.raises(
        SettingsError, match=f"with {re.escape(member.name)}, which no such file has"
    ):
        unpack(file, KIND)
    assert new.files == {}
    assert [*new.compiled.iterdir()] == []


def test_an_archive_fills_no_more_than_its_bounds(
    new: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [tarfile.TarInfo(f"triton/{number}") for number in range(9)]
    for member in members:
        member.size = 1000
    file = changed(tmp_path / "code.tar.gz", *members)
    new.enter()

    monkeypatch.setattr(cache, "MOST_BYTES", 8500)
    with pytest.raises(SettingsError, match="with more than"):
        unpack(file, KIND)
    monkeypatch.setattr(cache, "MOST_BYTES", 10_000)
    monkeypatch.setattr(cache, "MOST_FILES", 8)
    with pytest.raises(SettingsError, match="with more than"):
        unpack(file, KIND)
    assert new.files == {}
    monkeypatch.setattr(cache, "MOST_FILES", 9)
    assert unpack(file, KIND) == 9


@pytest.mark.parametrize(
    "kind", [{"format": 2, "kind": KIND}, {"format": 1}, {"format": 1, "kind": {"torch": "1"}}, [1]]
)
def test_an_archive_of_another_form_is_refused(new: Machine, tmp_path: Path, kind: object) -> None:
    new.enter()
    with pytest.raises(SettingsError, match="must be written by `nyala cache pack` of this"):
        unpack(changed(tmp_path / "code.tar.gz", kind=kind), KIND)


def test_a_damaged_archive_is_refused_and_adds_nothing(
    old: Machine, new: Machine, tmp_path: Path
) -> None:
    old.write("triton/KEY/kernel.cubin", "0123456789" * 5000)
    file = packed(old, tmp_path / "code.tar.gz")
    whole = file.read_bytes()
    new.enter()

    for content in (whole[: len(whole) // 2], whole[:200], b"text", b""):
        file.write_bytes(content)
        with pytest.raises(SettingsError, match="must be written by `nyala cache pack`"):
            unpack(file, KIND)
    assert new.files == {}


@pytest.mark.parametrize("group", ["{", "[]", '{"child_paths": 7}'])
def test_a_group_of_another_form_is_refused(
    old: Machine, new: Machine, tmp_path: Path, group: str
) -> None:
    old.write("inductor/ab/cab.so")
    old.write("triton/KEY/__grp__kernel.json", group)
    file = packed(old, tmp_path / "code.tar.gz")
    new.enter()

    with pytest.raises(SettingsError, match="must be written by `nyala cache pack`"):
        unpack(file, KIND)
    assert new.files == {}


def test_what_cannot_be_packed_is_refused(old: Machine, tmp_path: Path) -> None:
    old.enter()
    with pytest.raises(SettingsError, match="there must be compiled code to pack, got none in"):
        pack(tmp_path / "code.tar.gz", KIND)
    old.write("triton/KEY/kernel.cubin")
    with pytest.raises(SettingsError, match="must be in a folder that exists"):
        pack(tmp_path / "missing" / "code.tar.gz", KIND)
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(SettingsError, match="must be a new file"):
        pack(tmp_path / "mine", KIND)
    assert (tmp_path / "mine").read_text() == "mine"
    with pytest.raises(SettingsError, match="must be a file of `nyala cache pack`, got"):
        unpack(tmp_path / "missing", KIND)


def test_no_part_of_an_archive_is_left(
    old: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = old.write("triton/KEY/kernel.cubin")
    old.enter()
    monkeypatch.setattr(Path, "read_bytes", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pack(tmp_path / "code.tar.gz", KIND)
    assert [*tmp_path.glob("*.gz")] == []
    assert path.exists()


def test_the_verb_carries_code_and_names_kind_and_folders(
    old: Machine, new: Machine, tmp_path: Path
) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["cache", *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    old.write("inductor/ab/cab.cpp")
    old.enter()
    assert f"torch {kind_of_machine()['torch']}" in run("pack", str(tmp_path / "code.tar.gz"))
    assert kind_of_machine()["GPU"]

    new.enter()
    told = run("unpack", str(tmp_path / "code.tar.gz"))
    assert told.startswith("1 new files")
    assert str(new.compiled / "inductor") in told
    assert new.files == old.files
