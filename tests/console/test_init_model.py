"""The initial model: commands of the two rooms, one after the other."""

import io
import sys

import pytest
from rich.console import Console

from configs.errors import NyalaError, SettingsError
from configs.settings import RunSettings, Settings
from console.run import init_model
from console.run.init_model import is_made, make_model, reuse, stamp
from console.run.run_folder import RunFolder
from console.verbs import session
from console.verbs.new import init_model as init_model_verb

EXPORT = "import sys; open(sys.argv[1], 'w').write('shown')"
TRAIN = """
import json, os, sys
assert open(sys.argv[1]).read() == "shown"
os.mkdir(sys.argv[2])
print("a line that is no progress")
for step in (1, 2):
    print(json.dumps({"step": step, "steps": 2, "loss": 0.5}), flush=True)
open(sys.argv[2] + "/config.json", "w").write("{}")
"""


@pytest.fixture
def settings(tmp_path):
    return Settings(run=RunSettings(model="init", name="r", directory=tmp_path))


@pytest.fixture
def rooms(monkeypatch):
    def replace(export=EXPORT, train=TRAIN):
        monkeypatch.setattr(
            init_model,
            "export_command",
            lambda _, out, *, count: [sys.executable, "-c", export, str(out), str(count)],
        )
        monkeypatch.setattr(
            init_model,
            "warm_start_command",
            lambda _, shown, out: [sys.executable, "-c", train, str(shown), str(out)],
        )

    replace()
    return replace


def make(settings, target):
    shown = []
    make_model(settings, target, show=lambda *report: shown.append(report))
    return shown


def test_the_model_is_made_with_progress_and_then_kept(settings, rooms, tmp_path):
    shown = make(settings, tmp_path / "init")

    assert shown == [
        ("writing examples", 0, 0),
        ("building the model", 0, 0),
        ("supervised start", 1, 2),
        ("supervised start", 2, 2),
    ]
    assert (tmp_path / "init" / "config.json").exists()
    assert is_made(settings, tmp_path / "init")
    assert [path.name for path in tmp_path.iterdir()] == ["init"]


@pytest.mark.parametrize(("steps", "count"), [(0, 1000), (5, 20_000)])
def test_without_a_supervised_start_few_examples_give_the_characters(
    settings, rooms, tmp_path, steps, count
):
    learner = settings.learner.model_copy(update={"warm_start_steps": steps})
    rooms(export=f"{EXPORT}; assert sys.argv[2] == '{count}', sys.argv")

    make(settings.model_copy(update={"learner": learner}), tmp_path / "init")


def test_only_settings_that_the_model_depends_on_make_it_anew(settings, rooms, tmp_path):
    make(settings, tmp_path / "init")
    wider = settings.learner.model_copy(update={"init_width": 256})
    faster = settings.learner.model_copy(update={"lr": 1.0})

    assert is_made(settings.model_copy(update={"learner": faster}), tmp_path / "init")
    assert not is_made(settings.model_copy(update={"learner": wider}), tmp_path / "init")
    other_task = settings.run.model_copy(update={"environment": "calculator"})
    assert stamp(settings.model_copy(update={"run": other_task})) != stamp(settings)


def test_the_stamp_of_an_environment_that_only_its_own_python_has() -> None:
    def of(*requirements: str) -> str:
        run = {"environment": "no_such:make", "environment_requirements": requirements}
        return stamp(Settings(run=RunSettings.model_validate({"model": "init"} | run)))

    assert of("no-such==1") == of("no-such==1") != of("no-such==2")
    with pytest.raises(SettingsError, match="there is no module 'no_such' on this machine"):
        of()


def test_a_failure_leaves_nothing_and_gives_the_words_of_the_process(settings, rooms, tmp_path):
    rooms(
        export="""
import sys
print('{"event": "run.environment must be known, got x", "level": "error"}', file=sys.stderr)
sys.exit(2)
"""
    )

    with pytest.raises(SettingsError, match=r"^run\.environment must be known, got x$"):
        make(settings, tmp_path / "init")

    assert list(tmp_path.iterdir()) == []


def test_a_crash_shows_the_end_of_the_log(settings, rooms, tmp_path):
    rooms(train="raise ZeroDivisionError('oops')")

    with pytest.raises(
        NyalaError, match=r"(?s)must end with 0, got 1; mend what the end of its log says:.*oops"
    ):
        make(settings, tmp_path / "init")

    assert not (tmp_path / "init").exists()


def test_a_fresh_run_takes_the_model_of_the_archived_one_if_it_fits(settings, rooms, tmp_path):
    make(settings, tmp_path / "old" / "init")
    deeper = settings.learner.model_copy(update={"init_layers": 9})

    assert not reuse(
        settings.model_copy(update={"learner": deeper}), tmp_path / "old", RunFolder(tmp_path / "n")
    )
    assert reuse(settings, tmp_path / "old", RunFolder(tmp_path / "r"))
    assert is_made(settings, tmp_path / "r" / "init")


def test_nothing_is_made_for_a_model_that_is_there(tmp_path, capsys):
    config = tmp_path / "mine.yaml"
    config.write_text("run: {model: Qwen/Qwen3-0.6B, environment: 'nowhere.py:Env'}")

    init_model_verb(config)

    assert "run.model is Qwen/Qwen3-0.6B: nothing is to be made" in capsys.readouterr().out


def test_an_interrupted_start_tells_that_it_begins_anew(settings, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "make_if_needed", interrupted)
    written = io.StringIO()
    console = Console(file=written, width=500)
    folder = RunFolder(tmp_path / "r")
    started = session.Session(settings, folder, console, redis_url="-", resume_command="up")

    with pytest.raises(KeyboardInterrupt):
        started._make_model()

    assert "the model is made anew by the next start" in written.getvalue()
