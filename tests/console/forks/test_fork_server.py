"""A real fork server with real roles: what they are, how they end, and their start without it."""

import io
import json
import os
import signal
import socket
from pathlib import Path

import pytest
from rich.console import Console

from actors.engine.character_tokenizer import make_tokenizer
from broker.transport.keys import make_client, make_keys
from configs.errors import NyalaError, SettingsError
from configs.loader import load
from console.run import init_model, preflight
from console.run.fork_server import ForkServer
from console.run.plan import environment_of
from console.run.preflight import check_start
from console.run.process import PYTHON, Command, Process
from console.run.redis_server import free_port
from learner import initial_model
from tests.console.support.recorded_groups import Groups
from tests.waiting import is_alive, wait_until

pytestmark = pytest.mark.slow

SETTINGS = """
run: {{name: r, directory: "{directory}", model: init, environment: calculator, steps: 1}}
broker: {{endpoint: "tcp://127.0.0.1:{port}"}}
actors: {{engine: torch}}
"""
IMPORT_S = 120.0


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(SETTINGS.format(directory=tmp_path, port=free_port()))
    make_keys(tmp_path / "r" / "keys")
    make_client(tmp_path / "r" / "keys", "actor-0")
    return path


@pytest.fixture
def environment(config):
    environment = environment_of("actor", load(config))
    environment.pop("PYTEST_CURRENT_TEST")  # it changes
    return environment


@pytest.fixture
def server(environment):
    server = ForkServer("torch", environment)
    yield server
    server.close()


class Started:
    """Processes of a server, each with a log."""

    def __init__(self, folder, environment):
        self.groups = Groups()
        self.folder = folder
        self.environment = environment
        self.processes = []

    def __call__(self, server, *arguments, **variables):
        log = self.folder / f"{len(self.processes)}.log"
        environment = {**self.environment, **variables}
        command = Command("x", "actor", (*PYTHON, *map(str, arguments)), log, environment)
        process = Process(command, self.groups, server)
        wait_until(lambda: process.can_start, timeout_s=IMPORT_S)
        process.start()
        self.processes.append(process)
        return process, log


@pytest.fixture
def start(tmp_path, environment):
    started = Started(tmp_path, environment)
    yield started
    for process in started.processes:
        process.kill()


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_role_is_a_fork_of_the_server_and_as_a_new_program_would_be(server, start, config):
    actor, log = start(
        server, "actors", "--config", config, "--key", "actor-0", NYALA_REDIS_URL="redis://secret"
    )
    wait_until(lambda: "looking for the broker" in log.read_text())
    shown = Path(f"/proc/{actor.pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    libraries = Path(f"/proc/{actor.pid}/smaps_rollup").read_text()

    assert shown == [*PYTHON, "actors", "--config", str(config), "--key", "actor-0"]
    assert parent_of(actor.pid) == os.getpid()
    assert os.getpgid(actor.pid) == actor.pid
    assert actor.poll() is None
    shared = {line.split(":")[0]: line.split()[1] for line in libraries.splitlines()[1:]}
    assert int(shared["Private_Dirty"]) < int(shared["Rss"]) / 2
    assert b"secret" not in Path(f"/proc/{server.pids[0]}/environ").read_bytes()

    os.kill(actor.pid, signal.SIGKILL)

    wait_until(lambda: actor.poll() == -signal.SIGKILL)
    assert start.groups.calls == [("+", actor.pid), ("-", actor.pid)]


def test_learner_and_actor_end_with_their_own_code_and_a_later_life_is_a_fork_too(server, start):
    for role in ("learner", "actors", "learner"):
        process, log = start(server, role, "--config", "/nowhere.yaml")

        assert wait_until(process.poll) == 2

        (row,) = map(json.loads, log.read_text().splitlines())
        assert "/nowhere.yaml must be a YAML file" in row["event"]


def test_without_its_server_a_role_begins_as_a_new_program(server, start):
    os.kill(server.pids[0], signal.SIGKILL)

    process, log = start(server, "actors", "--config", "/nowhere.yaml")

    wait_until(lambda: process.poll() == 2)
    assert "/nowhere.yaml must be a YAML file" in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [(("actors",), {"OMP_NUM_THREADS": "7"}), (("broker",), {})],
    ids=["with another environment", "without the libraries"],
)
def test_what_was_not_imported_as_a_process_needs_it_is_no_fork(
    server, environment, arguments, variables, tmp_path
):
    command = Command(
        "x", "x", (*PYTHON, *arguments), tmp_path / "log", {**environment, **variables}
    )

    assert server.has_decided(command)  # it waits for no import
    with (tmp_path / "log").open("wb") as log:
        assert server.start(command, log, log) is None


def test_the_server_ends_when_nyala_up_has_gone(environment, tmp_path):
    program = (
        "import json, os, sys, time\n"
        "from console.run.fork_server import ForkServer\n"
        "print(ForkServer('torch', json.loads(sys.argv[1])).pids[0], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = Command(
        "up",
        "up",
        (*PYTHON[:1], "-c", program, json.dumps(environment)),
        tmp_path / "log",
        environment,
    )
    up = Process(command, Groups())
    up.start()
    wait_until(lambda: up.poll() == -signal.SIGKILL)
    pid = int((tmp_path / "log").read_text())

    wait_until(lambda: not is_alive(pid), timeout_s=IMPORT_S)


def test_a_server_that_stands_still_ends_with_a_killed_nyala_up(config, environment, tmp_path):
    program = (
        "import os, signal, sys\n"
        "from configs.loader import load\n"
        "from console.run.fork_server import fork_server_of\n"
        "with fork_server_of(load(sys.argv[1])) as server:\n"
        "    os.kill(server.pids[0], signal.SIGSTOP)\n"
        "    print(server.pids[0], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = Command(
        "up", "up", (*PYTHON[:1], "-c", program, str(config)), tmp_path / "log", environment
    )
    up = Process(command, Groups())
    up.start()
    wait_until(lambda: up.poll() == -signal.SIGKILL)
    pid = int((tmp_path / "log").read_text())

    wait_until(lambda: not is_alive(pid))


DRIVER = """
import ctypes
load = ctypes.CDLL
class Driver:
    def cuDeviceGetCount(self, _): return {}
ctypes.CDLL = lambda *a, **k: Driver() if "cuda" in str(a[0]) else load(*a, **k)
"""
"""A stand-in for CUDA's driver, which an import has initialised or only loaded."""
THREAD = """
import threading
threading.Thread(target=threading.Event().wait, name="of a library", daemon=True).start()
"""
SLEEPING = """
import ctypes
libc = ctypes.CDLL(None)
libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.pause, None)
"""


@pytest.mark.parametrize(
    ("imported", "fault"),
    [
        (DRIVER.format(0), "CUDA is initialised"),
        (DRIVER.format(3), ""),
        (THREAD, "there are other threads: Python's 'of a library' (S)"),
        (SLEEPING, ""),
    ],
    ids=["CUDA", "CUDA's driver", "a thread of Python's", "a thread of a library"],
)
def test_a_server_that_may_not_fork_says_why(environment, start, tmp_path, imported, fault):
    (tmp_path / "sitecustomize.py").write_text(imported)
    # Only in the server: what begins as a new program has no such thread.
    changed = environment | {"PYTHONPATH": str(tmp_path)}
    server = ForkServer("torch", changed)
    try:
        process, log = start(server, "learner", "--help", PYTHONPATH=str(tmp_path))
        assert wait_until(lambda: process.poll() is not None)
        assert process.poll() == 0
        first = log.read_text().partition("\n")[0]
        assert (json.loads(first)["why"] if fault else "") == fault
        assert first.startswith("{") is bool(fault)
    finally:
        server.close()


@pytest.fixture
def only_elsewhere(monkeypatch):
    def found(*_):
        raise AssertionError("this process did the checks")

    monkeypatch.setattr(preflight, "_findings", found)


def made_model(folder):
    tokenizer = make_tokenizer(["0123456789+-*/()=?"])
    model = initial_model.make_model(tokenizer, layers=1, width=64, tied=True, seed=0)
    for part in (tokenizer, model):
        part.save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(params=[False, True], ids=["few cores", "many cores"])
def any_server(server, request):
    server.has_room = request.param
    return server


def test_another_process_does_the_checks_of_a_start(
    any_server, config, only_elsewhere, tmp_path, capfd
):
    model = made_model(tmp_path)
    reward = tmp_path / "rewards.py"
    reward.write_text("print('it prints')\ndef f(prompts, **_): return [0.0] * len(prompts)\n")
    flags = (f"run.model={model}", f"run.reward={reward}:f", "rewards.weights={g: 1}")

    doubts = check_start(load(config, flags), redis_url=None, forks=any_server)

    assert len(doubts) == 1
    assert "rewards.weights must name parts of the reward" in doubts[0]
    assert "it prints" in "".join(capfd.readouterr())
    with pytest.raises(SettingsError, match=r"run\.max_prompt_tokens must be enough"):
        check_start(
            load(config, (*flags, "run.max_prompt_tokens=1")), redis_url=None, forks=any_server
        )


def test_checks_that_stand_still_end_at_their_limit(
    server, config, only_elsewhere, tmp_path, monkeypatch
):
    pids = tmp_path / "pids"
    reward = tmp_path / "rewards.py"
    reward.write_text(
        "import os, threading\n"
        f"open('{pids}', 'a').write(f'{{os.getppid()}}\\n')\n"
        "threading.Event().wait()\n"
    )
    flags = (f"run.model={made_model(tmp_path)}", f"run.reward={reward}:f")
    monkeypatch.setattr(preflight, "_limit_s", lambda *_: 4.0)

    with pytest.raises(
        SettingsError, match=r"checks before a start must end within 4 s.*nyala doctor"
    ):
        check_start(load(config, flags), redis_url=None, forks=server)

    assert not is_alive(int(pids.read_text().split()[0]))


def test_the_limit_of_all_checks_is_that_of_each(config):
    alone = preflight._limit_s(load(config), None)

    assert alone > 300
    assert preflight._limit_s(load(config), "redis://x") > alone


def test_what_fails_here_and_elsewhere_is_told_together(server, config, only_elsewhere, tmp_path):
    server.has_room = True
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        flags = (f"broker.endpoint=tcp://127.0.0.1:{port}", f"run.model={tmp_path}")

        with pytest.raises(SettingsError, match=r"(?s)^2 things .* is in use .*config\.json"):
            check_start(load(config, flags), redis_url=None, forks=server)


def test_on_a_machine_with_cores_checks_do_not_wait_for_a_server(
    server, config, only_elsewhere, tmp_path
):
    server.has_room = True
    os.kill(server.pids[0], signal.SIGSTOP)  # as one that imports yet

    flags = (f"run.model={made_model(tmp_path)}",)
    assert check_start(load(config, flags), redis_url=None, forks=server) == []


def test_checks_that_need_no_library_wait_for_none(config, environment):
    server = ForkServer("torch", environment)
    try:
        assert check_start(load(config), redis_url=None, forks=server) == []
        assert not server.has_decided(
            Command("x", "x", (*PYTHON, "learner"), Path(os.devnull), environment)
        )
    finally:
        server.close()


def test_a_fork_makes_the_model(server, config, tmp_path, monkeypatch):
    steps = ("learner.warm_start_steps=2", "learner.init_layers=1", "learner.init_width=64")
    settings = load(config, steps)
    shown = io.StringIO()

    init_model.make_if_needed(settings, tmp_path / "init", Console(file=shown), forks=server)

    assert init_model.is_made(settings, tmp_path / "init")
    assert "supervised start" in shown.getvalue()

    monkeypatch.setattr(
        init_model,
        "warm_start_command",
        lambda config, *_: [*PYTHON, "learner", "warm-start", "--config", str(config)],
    )
    with pytest.raises(NyalaError, match=r"(?s)must end with 0, got 2; .* needs --demonstrations"):
        init_model.make_model(settings, tmp_path / "other", show=lambda *_: None, forks=server)


@pytest.mark.live
@pytest.mark.parametrize(("cores", "servers"), [(2, 1), (4, 2)])
def test_actors_with_vllm_are_forks_of_a_second_server(
    environment, start, monkeypatch, cores, servers
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    server = ForkServer("vllm", environment)
    assert len(server.pids) == servers
    try:
        learner, _ = start(server, "learner", "--config", "/nowhere.yaml")
        actor, log = start(server, "actors", "--config", "/nowhere.yaml")
        assert parent_of(actor.pid) == os.getpid()
        wait_until(lambda: (learner.poll(), actor.poll()) == (2, 2))
        assert "/nowhere.yaml must be a YAML file" in log.read_text()

        os.kill(server.pids[0], signal.SIGKILL)  # where there is one, that of actors is its child
        actor, _ = start(server, "actors", "--config", "/nowhere.yaml")
        assert wait_until(actor.poll) == 2
    finally:
        server.close()
