"""Lua files and their libraries: each includes exactly what it uses, and uses nothing undefined."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from buffer.client.scripts import FILES, LUA, assemble, load_script
from tests.buffer.support.lua_names import defined_names, free_names

LIBRARIES = {name: path.read_text() for name, path in FILES.items() if path.parent.name == "lib"}
OWNERS = {name: library for library, text in LIBRARIES.items() for name in defined_names(text)}
OF_REDIS = {"redis", "KEYS", "ARGV"}
OF_LUA = {"ipairs", "math", "pairs", "string", "table", "tonumber", "unpack"}


def test_no_two_files_and_no_two_library_names_are_the_same() -> None:
    assert len(FILES) == len(list(LUA.rglob("*.lua")))
    assert len(OWNERS) == sum(len(defined_names(text)) for text in LIBRARIES.values())


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_includes_exactly_what_it_uses(name: str) -> None:
    text = FILES[name].read_text()

    used = free_names(text) - OF_REDIS - OF_LUA

    assert used <= OWNERS.keys(), "names that no library defines"
    header = text.splitlines()[0]
    included = header.removeprefix("--- @include ").split(", ") if "@include" in header else []
    assert sorted(included) == sorted({OWNERS[used_name] for used_name in used})


@pytest.mark.parametrize("name", sorted(FILES.keys() - LIBRARIES.keys()))
def test_a_script_with_its_libraries_leaves_no_name_open(name: str) -> None:
    assert free_names(load_script(name).source) <= OF_REDIS | OF_LUA


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_script_gives_redis_a_negated_value(name: str) -> None:
    """Zero would become "-0", which Redis 7 refuses as an integer; `0 - x` has no such value."""
    code = "\n".join(line.split("--")[0] for line in FILES[name].read_text().splitlines())

    assert not re.findall(r"[(,]\s*-\s*[a-z#(].*", code)


def test_names_are_found_where_the_compiler_finds_them() -> None:
    source = "local a, b = 1\nlocal function c(d) return e(a, 'f', { g = h.i }) end\nj = b"

    assert free_names(source) == {"e", "h", "j"}
    assert defined_names(source) == ["a", "b", "c"]


def _folder(tmp_path: Path, **texts: str) -> dict[str, Path]:
    files = {}
    for name, text in texts.items():
        path = tmp_path / ("run" if name == "script" else "lib") / f"{name}.lua"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        files[name] = path
    return files


def test_libraries_come_once_and_before_those_that_include_them(tmp_path: Path) -> None:
    files = _folder(
        tmp_path,
        keys="local k\n",
        units="--- @include keys\nlocal u\n",
        tasks="--- @include keys, units\nlocal t\n",
        other="local o\n",
        script="--- @include tasks, keys\nreturn t\n",
    )

    lines = [line for line in assemble("script", files).splitlines() if line[:3] in ("loc", "ret")]

    assert lines == ["local k", "local u", "local t", "return t"]


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("--- @include nothing\n", "may include only libraries of lua/lib, got 'nothing'"),
        ("--- @include script\n", "may include only libraries of lua/lib, got 'script'"),
        ("--- @include keys,units\n", "must have its include in line 1"),
        ("-- @include keys\n", "must have its include in line 1"),
        ("-- ARGV\n--- @include keys\n", "must have its include in line 1"),
        ("--- @include round\n", "cycle"),
    ],
)
def test_a_bad_include_is_an_error_at_load(tmp_path: Path, script: str, text: str) -> None:
    files = _folder(
        tmp_path,
        keys="",
        units="",
        round="--- @include about\n",
        about="--- @include round\n",
        script=script,
    )

    with pytest.raises(ValueError, match=text):
        assemble("script", files)
