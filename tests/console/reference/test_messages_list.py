"""docs/messages.md and `nyala messages` have every message, with cause and cure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from configs import errors
from configs.settings import Settings
from console.main import app
from console.verbs.messages import (
    ROOT,
    VALUE,
    as_markdown,
    error_classes,
    explained,
    messages,
    modules,
    shape,
)
from learner.data import group_filter

PAGE = ROOT / "docs" / "messages.md"
ADD = "add or remove it in console/verbs/causes.yaml"
LEVELS = {"warning", "error", "exception", "critical"}
LUA_REASON = re.compile(r"\b(?:charge|take_away|drop_unit)\(.*'([a-z_ ]+)'\)")


@pytest.mark.slow
def test_the_page_is_written_from_the_source() -> None:
    is_same = PAGE.read_text(encoding="utf-8") == as_markdown()

    assert is_same, "write it again: .venv/bin/nyala messages --markdown > docs/messages.md"


def calls() -> Iterator[ast.Call]:
    for _, nodes in modules():
        yield from (node for node in nodes if isinstance(node, ast.Call) and node.args)


def first_arguments(of: str) -> set[str]:
    found = (call for call in calls() if isinstance(call.func, ast.Name) and call.func.id == of)
    return {shape(call.args[0]) for call in found}


def log_lines() -> set[str]:
    """Collect lines of logs from warning on."""
    return {
        text
        for call in calls()
        if isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS
        if is_log(call.func.value)
        for text in choices(call.args[0])
    }


def lines_of_up() -> set[str]:
    """Collect what `nyala up` says of a run and of the ends of its processes."""
    said = {
        shape(node.args[0])
        for module, nodes in modules()
        if module == "console/verbs/session.py"
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in {"log", "_say"}
        if isinstance(node.args[0], ast.JoinedStr | ast.Constant)
    }
    ends = {
        shape(call.args[1])
        for call in calls()
        if isinstance(call.func, ast.Name) and call.func.id == "Decision"
    }
    only_passed_on = {text for text in said if not re.search("[a-z]{2}", VALUE.sub("", text))}
    refused = {text for text in said if text.startswith("warning: ")}  # in their own table
    return said - only_passed_on - refused | ends


def is_log(node: ast.expr) -> bool:
    match node:
        case ast.Name("log") | ast.Call(func=ast.Attribute(attr="get_logger")):
            return True
        case _:
            return False


def choices(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from (*choices(node.body), *choices(node.orelse))
    else:
        yield shape(node)


def lua_reasons() -> set[str]:
    """Collect reasons for which scripts of the store end tasks and groups."""
    scripts = (ROOT / "buffer" / "lua").rglob("*.lua")
    lines = (line for path in scripts for line in path.read_text(encoding="utf-8").splitlines())
    return {reason for line in lines for reason in LUA_REASON.findall(line)}


def in_the_source(family: str) -> set[str]:
    """Collect what the source has of a family."""
    dropped = {group_filter.UNREADABLE, group_filter.IMPOSSIBLE, group_filter.STALE}
    of_lua = lua_reasons()
    return {
        "errors": set(error_classes()),
        "refusals of the broker": first_arguments("Refusal"),
        "alerts": first_arguments("Alert"),
        "lines of nyala up": lines_of_up(),
        "log lines": log_lines(),
        "dead letters": of_lua - {"group_broken"} | {"poison", "(text of an actor)"},
        "dropped groups": dropped | {group_filter.ZERO_VARIANCE, "group_broken", "forgotten"},
    }[family]


@pytest.mark.parametrize(
    "family",
    [
        "errors",
        "refusals of the broker",
        "alerts",
        "lines of nyala up",
        "log lines",
        "dead letters",
        "dropped groups",
    ],
)
def test_every_message_of_a_family_has_cause_and_cure(family: str) -> None:
    listed = set(explained()[family])

    assert in_the_source(family) - listed == set(), f"without cause and cure: {ADD}"
    assert listed - in_the_source(family) == set(), f"no longer in the source: {ADD}"


def test_every_exit_code_of_an_error_is_listed() -> None:
    every = [each for each in vars(errors).values() if isinstance(each, type)]
    codes = {
        str(errors.exit_code(each("text"))) for each in every if issubclass(each, errors.NyalaError)
    }

    assert codes == {"1", "2", "3", "4", "5"}
    assert codes <= set(explained()["exit codes"])


def test_every_message_has_a_cause_and_a_cure() -> None:
    without = [each.text for each in messages() if not each.cause.strip() or not each.cure.strip()]

    assert without == []


def test_settings_that_a_cure_names_exist() -> None:
    tables = "|".join(Settings.model_fields)
    known = {
        f"{table}.{key}"
        for table, field in Settings.model_fields.items()
        for key in getattr(field.annotation, "model_fields", {})
    }
    rows = [text for rows in explained().values() for why in rows.values() for text in why]
    named = {word.partition(":")[0] for text in rows for word in text.split("`")[1::2]}
    settings = {name for name in named if re.fullmatch(rf"({tables})\.\w+", name)}

    assert len(settings) > 20
    assert settings - known == set()


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        (
            "12:00:03 warning  no answer from the broker yet  broker=tcp://10.0.0.1:5757",
            "keys/allowed",
        ),
        ("nyala: mine.yaml must be a YAML file, got a directory", "<path> must be a YAML file"),
        ("zero_variance", "filter_zero_variance"),
        ("had to be killed", "console.stop_timeout_s"),
        ("had to be killed: learner, actor-0", "console.stop_timeout_s"),
        ("actor-0 was killed by signal 9 (out of memory?); it starts again", "out of memory"),
        ("actor-1 ended with code 1; it starts again in 0.6 s: a thread died", "nyala logs"),
        ("stopped: learner needs something changed first", "resume with the command"),
        ("xyzzy", "no message has this text"),
    ],
)
def test_what_somebody_sees_leads_to_its_cure(seen: str, found: str) -> None:
    done = CliRunner().invoke(app, ["messages", seen])

    assert done.exit_code == 0
    assert found in done.output
    assert len(done.output.splitlines()) < 30
