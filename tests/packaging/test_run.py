"""`./run` sets up once, from the lock that fits, whichever way this machine can, and steps aside.

A fake `uv` stands for the installer: it notes how it was called and makes what the real one would
make, a `nyala` command and the folder of peers. What a real set-up installs is shown by the suite
itself, which runs in it.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAKE_UV = """#!/bin/sh
echo "$*" >>"$CALLS"
echo "$UV_COMPILE_BYTECODE" >>"$CALLS.compiles"
if [ -n "${REFUSE:-}" ]; then
  case "$*" in *"$REFUSE"*) echo "refused" >&2; exit 1 ;; esac
fi
case "$*" in
  *--editable*)
    printf '#!/bin/sh\\necho "nyala $*"\\necho "$NYALA_TYPED in $PWD" >"$CALLS.typed"\\n' \\
      >.venv/bin/nyala
    chmod +x .venv/bin/nyala ;;
  *--target*) mkdir .venv/peers ;;
  *) sleep "${SLOW:-0}" ;;
esac
"""

# As on a Debian without python3-venv: an environment with pip cannot be made. Starting pip costs
# seconds, so only the test of its configuration does.
BARE_PYTHON = """#!/bin/sh
case "$*" in
  "-m venv --clear --without-pip "*) ;;
  "-m venv "*) exit 1 ;;
  "-m pip "*) [ -n "$PIP_CONFIG_FILE" ] || exit 1 ;;
esac
exec "%s" "$@"
"""


@dataclass
class Checkout:
    """A copy of what set-up reads, on a machine of our making."""

    folder: Path
    environment: dict[str, str]

    def start(self, *arguments, **environment):
        return subprocess.Popen(
            ["sh", self.folder / "run", *arguments],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments, **environment):
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def calls(self):
        """How uv was called, one line a call; once read, forgotten."""
        path = Path(self.environment["CALLS"])
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path):
    folder, tools = tmp_path / "a checkout", tmp_path / "tools"
    tools.mkdir()
    (folder / "requirements").mkdir(parents=True)
    locks = (f"requirements/{name}.lock" for name in ("cpu", "cuda", "dev", "peers"))
    for name in ("run", "pyproject.toml", *locks):
        shutil.copy(ROOT / name, folder / name)
    write_program(tools / "uv", FAKE_UV)
    python = write_program(tools / "python", BARE_PYTHON % sys.executable)
    environment = {
        "CALLS": str(tmp_path / "calls"),
        "HOME": str(tmp_path),
        "PATH": f"{tools}:/usr/bin:/bin",
        "PROFILE": "cpu",
        "PYTHON": str(python),
    }
    return Checkout(folder, environment)


@pytest.mark.parametrize("script", ["run", ".ci/run", "requirements/lock", "tests/bare/run"])
def test_scripts_are_posix_sh(script):
    shell = shutil.which("dash") or "sh"

    subprocess.run([shell, "-n", ROOT / script], check=True, timeout=10)
    assert (ROOT / script).read_text().startswith("#!/bin/sh\n")
    assert os.access(ROOT / script, os.X_OK)


def test_ci_runs_exactly_what_a_person_runs():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()

    assert [line for line in lines if not line.startswith("#")] == [
        "set -eu",
        'cd "$(dirname "$0")/.."',
        "exec ./run test",
    ]


def test_a_verb_sets_up_and_goes_on_to_nyala(checkout):
    done = checkout.run("status", "runs/demo")

    assert (done.returncode, done.stdout) == (0, "nyala status runs/demo\n"), done.stderr
    sync, editable = checkout.calls()
    assert sync.endswith("requirements/cpu.lock")
    assert editable.endswith("--no-deps --no-build-isolation --editable .")


def test_demo_is_up_of_the_demo_preset(checkout):
    preset = checkout.folder / "configs" / "demo.yaml"
    assert checkout.run("demo", "--plain").stdout == f"nyala up {preset} --plain\n"


def test_paths_are_those_of_the_callers_folder(checkout, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()

    typed = Path(checkout.environment["CALLS"] + ".typed")

    def call(*command, cwd):
        subprocess.run(
            command, cwd=cwd, env=checkout.environment, capture_output=True, check=True, timeout=60
        )
        return typed.read_text()

    there = call("../a checkout/run", "up", "mine.yaml", cwd=mine)
    here = call("./run", "demo", cwd=checkout.folder)
    bare = call("sh", "run", "status", "runs/demo", cwd=checkout.folder)

    assert there == f"../a checkout/run in {mine}\n"
    assert here == bare == f"./run in {checkout.folder}\n"
    assert checkout.run("up", "mine.yaml").stdout == "nyala up mine.yaml\n"


def test_demo_in_the_checkout_names_the_preset_as_the_readme_does(checkout, monkeypatch):
    monkeypatch.chdir(checkout.folder)
    assert checkout.run("demo").stdout == "nyala up configs/demo.yaml\n"


@pytest.mark.parametrize(
    "changed", ["requirements/cpu.lock", "requirements/dev.lock", "pyproject.toml", "run"]
)
def test_what_set_up_depends_on_sets_up_again(checkout, changed):
    checkout.run("setup")
    checkout.calls()

    with (checkout.folder / changed).open("a") as file:
        file.write("# changed\n")
    checkout.run("setup")

    assert len(checkout.calls()) == 2


def test_developers_tools_are_added_by_the_tests_and_stay(checkout):
    checkout.run("setup")
    (sync, _) = checkout.calls()
    assert "dev.lock" not in sync

    checkout.run("check")
    (sync, _) = checkout.calls()
    assert sync.endswith("requirements/cpu.lock requirements/dev.lock")

    checkout.run("setup")
    checkout.run("check")
    assert checkout.calls() == []

    with (checkout.folder / "requirements" / "cpu.lock").open("a") as file:
        file.write("# changed\n")
    checkout.run("status")
    (sync, _) = checkout.calls()
    assert sync.endswith("requirements/cpu.lock requirements/dev.lock")


def test_another_profile_sets_up_again_from_its_own_lock(checkout):
    checkout.run("setup")
    checkout.calls()

    checkout.run("setup", PROFILE="cuda", PIP_FIND_LINKS="wheels")

    sync, _ = checkout.calls()
    assert sync.endswith("requirements/cuda.lock")
    assert "--find-links" not in sync  # a local CPU build would win over the CUDA build


def test_packages_are_compiled_when_they_are_installed(checkout):
    checkout.run("setup")

    compiles = Path(checkout.environment["CALLS"] + ".compiles").read_text()
    assert compiles.split() == ["1", "0"]  # the lock's; of the checkout there is nothing to compile


def test_what_pip_was_told_holds_for_uv(checkout):
    checkout.run(
        "setup",
        PIP_INDEX_URL="https://main.invalid/simple",
        PIP_EXTRA_INDEX_URL="https://one.invalid/simple https://two.invalid/simple",
        PIP_FIND_LINKS="wheels more",
    )

    sync, editable = checkout.calls()
    for call in (sync, editable):
        assert "--default-index https://main.invalid/simple" in call
        assert "--index https://one.invalid/simple --index https://two.invalid/simple" in call
    assert "--find-links wheels --find-links more" in sync


def test_pips_configuration_file_counts_as_well(checkout, tmp_path):
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://file.invalid/simple\nfind-links = wheels\n more\n"
    )

    checkout.run("setup", PIP_CONFIG_FILE=str(config))

    sync, _ = checkout.calls()
    assert "--default-index https://file.invalid/simple" in sync
    assert "--find-links wheels --find-links more" in sync


def test_torch_comes_from_a_local_wheel_then_pytorch_then_the_package_index(checkout):
    done = checkout.run("setup", REFUSE="requirements/cpu.lock", PIP_FIND_LINKS="wheels")

    assert done.returncode == 0, done.stderr
    local, pytorch, rest, torch, _ = checkout.calls()
    assert "--find-links wheels" in local
    assert "--torch-backend" not in local
    assert "--torch-backend cpu" in pytorch
    assert rest.endswith("without-torch.lock")
    assert torch.rpartition(" ")[2].startswith("torch==")
    assert "+cpu" not in torch
    assert "torch==" not in (checkout.folder / ".venv" / "without-torch.lock").read_text()


def test_a_failed_set_up_fails_and_is_tried_again(checkout):
    failed = checkout.run("setup", REFUSE="pip")

    assert failed.returncode != 0
    assert "set-up failed" in failed.stderr
    checkout.calls()
    assert checkout.run("setup").returncode == 0
    assert len(checkout.calls()) == 2


@pytest.mark.slow
def test_two_at_once_set_up_once(checkout):
    both = [checkout.start("keys", SLOW="1") for _ in range(2)]

    assert [process.communicate(timeout=60)[0] for process in both] == ["nyala keys\n"] * 2
    assert len(checkout.calls()) == 2


def fake_smi(checkout, driver):
    """Put an nvidia-smi on the PATH that lists one card."""
    tools = Path(checkout.environment["PATH"].partition(":")[0])
    write_program(
        tools / "nvidia-smi", f'#!/bin/sh\ncase "$*" in *driver*) echo {driver} ;; esac\n'
    )


def test_a_card_whose_driver_is_too_old_for_the_lock_is_told_before_anything_is_fetched(checkout):
    fake_smi(checkout, "535.104.05")
    del checkout.environment["PROFILE"]

    refused = checkout.run("status")
    sentence = (
        "the NVIDIA driver must be 580 or newer for requirements/cuda.lock, got 535; update it"
    )

    assert refused.returncode == 1
    assert f"run: {sentence}, or choose PROFILE=cpu" in refused.stderr
    assert checkout.calls() == []
    assert checkout.run("status", PROFILE="cpu").stderr.count("driver") == 0
    asked_for = checkout.run("status", PROFILE="cuda")
    assert asked_for.returncode == 0
    assert f"run: {sentence}, or torch will see no GPU" in asked_for.stderr


@pytest.mark.parametrize("driver", ["580.65.06", "581", "[N/A]"])
def test_a_new_driver_or_one_that_does_not_tell_is_no_matter(checkout, driver):
    fake_smi(checkout, driver)
    del checkout.environment["PROFILE"]

    done = checkout.run("status")

    assert (done.returncode, "driver" in done.stderr) == (0, False), done.stderr
    assert checkout.calls()[0].endswith("requirements/cuda.lock")


def test_another_python_makes_another_environment(checkout, tmp_path):
    checkout.run("setup")
    checkout.calls()
    text = BARE_PYTHON % sys.executable
    other = (
        f'#!/bin/sh\ncase "$2" in *print*) echo "3 99"; exit ;; esac\n{text.partition(chr(10))[2]}'
    )
    named = write_program(tmp_path / "other", other)

    checkout.run("setup")
    assert checkout.calls() == []
    checkout.run("setup", PYTHON=str(named))
    assert len(checkout.calls()) == 2


def test_an_unknown_profile_is_refused(checkout):
    done = checkout.run("setup", PROFILE="tpu")

    assert done.returncode == 1
    assert "PROFILE must be cpu or cuda, got tpu" in done.stderr


OLD_PYTHON = '#!/bin/sh\ncase $1 in -V) echo "Python 3.9.2" ;; *) exit 1 ;; esac\n'
PYTHONS = ("python3", "python3.11", "python3.12", "python3.13", "python3.14")


@pytest.fixture
def old_machine(checkout, tmp_path):
    """A machine whose Pythons are all too old."""
    for name in PYTHONS:
        write_program(tmp_path / "tools" / name, OLD_PYTHON)
    del checkout.environment["PYTHON"]
    return checkout


def test_a_machine_without_a_fitting_python_is_told_what_to_install(old_machine, tmp_path):
    (tmp_path / "tools" / "uv").unlink()

    done = old_machine.run("setup")

    assert done.returncode == 1
    assert "Python must be 3.11 to 3.14, and none was found" in done.stderr
    for command in (
        "apt install python3 python3-venv",
        "apt install python3.11 python3.11-venv",
        "dnf install python3.13",
        "pipx install uv",
    ):
        assert command in done.stderr


def test_a_python_that_is_named_and_does_not_fit_is_refused(checkout, tmp_path):
    old = write_program(tmp_path / "old", OLD_PYTHON)

    done = checkout.run("setup", PYTHON=str(old))

    assert done.returncode == 1
    assert f"PYTHON must be a Python of 3.11 to 3.14, got {old} (Python 3.9.2)" in done.stderr


@pytest.mark.parametrize("name", PYTHONS[1:])
def test_any_python_that_fits_will_do(old_machine, tmp_path, name):
    write_program(tmp_path / "tools" / name, BARE_PYTHON % sys.executable)

    assert old_machine.run("setup").returncode == 0


def test_uv_is_asked_for_a_python_with_a_line(old_machine, tmp_path):
    """The fake one "fetches" the Python of this test."""
    fetched = write_program(tmp_path / "fetched", BARE_PYTHON % sys.executable)
    text = FAKE_UV.replace('case "$*" in\n', f'case "$*" in\n  "python find"*) echo {fetched} ;;\n')
    write_program(tmp_path / "tools" / "uv", text)

    done = old_machine.run("setup")

    assert done.returncode == 0, done.stderr
    assert "none is on the path; asking uv for 3.13" in done.stderr
    assert old_machine.calls()[:2] == ["python install -q 3.13", "python find 3.13"]


def test_a_uv_that_may_fetch_none_leaves_the_advice(old_machine):
    done = old_machine.run("setup", REFUSE="python install")

    assert done.returncode == 1
    assert "dnf install python3.13" in done.stderr


def test_what_the_machine_lacks_is_counted_over_all_parts_of_a_run(checkout):
    with_tools(checkout)
    lines = r"'2 vLLM: no library (apt install it)\n1 root: another user\n'"
    fake = f'#!/bin/sh\nprintf {lines} >>"$NYALA_LEFT_OUT"\n'
    write_program(checkout.folder / ".venv" / "bin" / "pytest", fake)

    done = checkout.run("test")

    assert done.returncode == 0
    assert done.stderr.splitlines()[-2:] == [
        "run: 3 test(s) left out without root: another user",
        "run: 6 test(s) left out without vLLM: no library (apt install it)",
    ]


def with_tools(checkout, broken=None):
    """The checkout, set up, with linters and pytest that pass, but for one."""
    checkout.run("setup", "dev")
    checkout.calls()
    for tool in ("ruff", "mypy", "basedpyright", "lint-imports", "codespell", "pytest"):
        status = 1 if tool == broken else 0
        text = f'#!/bin/sh\necho "{tool} $*"\nexit {status}\n'
        write_program(checkout.folder / ".venv" / "bin" / tool, text)
    return checkout


@pytest.mark.parametrize(
    ("verb", "checks", "broken", "fails"),
    [
        ("test", 9, None, 0),
        ("test", 9, "mypy", 1),
        ("test", 9, "pytest", 3),
        ("check", 6, None, 0),
        ("check", 6, "codespell", 1),
        ("check", 6, "pytest", 1),
    ],
)
def test_the_exit_code_counts_every_check(checkout, verb, checks, broken, fails):
    done = with_tools(checkout, broken).run(verb)

    assert done.returncode == (1 if broken else 0)
    assert done.stderr.count("  ok  ") == checks - fails
    assert done.stderr.count("FAILED  ") == fails
    assert broken in (None, "pytest") or f"FAILED  {broken} " in done.stderr


def test_a_linter_that_fails_shows_its_output_and_others_do_not(checkout):
    done = with_tools(checkout, "mypy").run("check")

    assert "mypy \n" in done.stdout
    assert "codespell" not in done.stdout


def test_check_leaves_out_what_is_slow_and_takes_a_pattern(checkout):
    calls = with_tools(checkout).run("check", "weights or keys").stdout.splitlines()

    (call,) = calls
    assert call.startswith("pytest -q -o cache_dir=")
    assert call.endswith(" -n 4 --dist loadfile -m not slow and not live -k weights or keys")


def test_tests_of_a_card_are_run_by_one_command(checkout):
    done = with_tools(checkout).run("test-gpu", "-k", "attention")

    assert (done.returncode, done.stdout) == (0, "pytest -q -m gpu tests/gpu -k attention\n")
    assert with_tools(checkout, "pytest").run("test-gpu").returncode == 1


def test_the_tests_of_ci_are_all_there(checkout):
    for name, marker in (("test_ring.py", "live"), ("test_fast.py", "slow")):
        path = checkout.folder / "tests" / "room" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"pytestmark = pytest.mark.{marker}\n")

    calls = with_tools(checkout).run("test").stdout.splitlines()

    expressions = [call.partition(" -m ")[2] for call in calls if " -m " in call]
    live = "live --durations 20 tests/room/test_ring.py"
    assert expressions == ["not live --durations 20", live]


@pytest.mark.parametrize(
    ("failures", "then", "code"),
    [(1, 0, 0), (3, 0, 0), (3, 1, 1), (4, 0, 1), (0, 0, 1)],
    ids=["one, then none", "three, then none", "three twice", "too many", "no test"],
)
def test_a_few_that_fail_are_tried_once_more_alone(checkout, failures, then, code):
    names = "".join(f'  "tests/test_it.py::test_{each}": true,\n' for each in range(failures))
    fake = f"""#!/bin/sh
for argument; do
  case $argument in
    cache_dir=*) folder=${{argument#cache_dir=}}/v/cache ;;
    --last-failed) echo "again $*"; exit {then} ;;
  esac
done
mkdir -p "$folder"
printf '{{\n{names}}}' >"$folder/lastfailed"
exit 1
"""
    with_tools(checkout)
    write_program(checkout.folder / ".venv" / "bin" / "pytest", fake)

    done = checkout.run("check")

    assert done.returncode == code
    assert (" -n 0 " in done.stdout) == (1 <= failures <= 3)
    assert done.stderr.count("UNSTEADY") == (0 if code else failures)
    assert ("test_it.py::test_0" in done.stderr) == (code == 0)


def test_test_long_lists_the_table_of_the_docs_and_runs_one_of_it(checkout):
    (checkout.folder / "docs").mkdir()
    (checkout.folder / "docs" / "tests.md").write_text(
        "| name | minutes | command | last run |\n| --- | --- | --- | --- |\n"
        "| `one` | 5 | `echo one $PATH` | - |\n| `one-more` | 90 | `exit 3` | - |\n"
    )

    listed = checkout.run("test-long")
    one = checkout.run("test-long", "one")
    refused = checkout.run("test-long", "on")

    assert listed.stdout == "one (5 min): echo one $PATH\none-more (90 min): exit 3\n"
    assert one.stdout.startswith(f"one {checkout.folder}/.venv/bin:")
    assert checkout.run("test-long", "one-more").returncode == 3
    assert refused.returncode == 1
    assert "must be followed by a name that `./run test-long` lists, got on" in refused.stderr


def test_every_row_of_the_docs_can_be_run_by_its_name(checkout):
    (checkout.folder / "docs").mkdir()
    page = Path(shutil.copy(ROOT / "docs" / "tests.md", checkout.folder / "docs")).read_text()
    rows = page.partition("| name |")[2].splitlines()[2:]

    listed = checkout.run("test-long").stdout.splitlines()

    assert len(listed) == len([row for row in rows if row.startswith("| `")]) >= 5


def test_what_tests_compare_with_is_installed_once_and_apart(checkout):
    with_tools(checkout).run("test", PIP_INDEX_URL="https://main.invalid/simple")

    (peers,) = checkout.calls()
    assert peers.endswith("peers --no-deps -r requirements/peers.lock")
    assert "--target" in peers
    assert "--default-index https://main.invalid/simple" in peers
    assert checkout.run("test").stderr.count("  ok  ") == 9
    assert checkout.calls() == []


def test_some_tests_need_no_peers(checkout):
    done = with_tools(checkout).run("test", "-k", "pattern")

    assert done.stderr.count("  ok  ") == 7
    assert checkout.calls() == []


def test_peers_that_cannot_be_had_fail_the_tests(checkout):
    done = with_tools(checkout).run("test", REFUSE="peers.lock")

    assert done.returncode == 1
    assert "FAILED  against rlax, TRL, datasets" in done.stderr
