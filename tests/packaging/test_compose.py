"""compose.yaml is what its specification allows, starts what exists, and hands out little.

No container engine is needed: the schema comes with check-jsonschema, and test_compose_ring.py
starts the services' commands as plain processes.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from configs.loader import load
from configs.metrics.endpoint import host_and_port
from configs.metrics.health import Health, Pulse
from configs.metrics.serving import serving
from configs.settings import RunSettings
from console.run.run_folder import RunFolder
from tests.packaging.support.compose_file import ROOT, STORE_SECRETS, load_compose, secrets_of

SERVICES = load_compose()["services"]
THEIRS = {"redis", "prometheus", "grafana"}
OURS = [name for name in SERVICES if name not in THEIRS]
ROLES = {"broker", "learner", "actor", "learner-cuda", "actor-cuda"}


def test_it_fits_the_compose_specification():
    package = importlib.util.find_spec("check_jsonschema")
    assert package is not None
    assert package.origin is not None
    vendor = Path(package.origin).parent / "builtin_schemas" / "vendor"
    schema = json.loads((vendor / "compose-spec.json").read_text())

    jsonschema.validate(load_compose(), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"services": {"redis": {"kommand": "x"}}}, schema)


def test_every_variable_has_a_default():
    assert "${" not in str(load_compose())


@pytest.mark.parametrize("name", OURS)
def test_the_command_of_a_service_exists(name):
    command = SERVICES[name]["command"]

    if command[0] == "sh":
        assert (ROOT / command[1]).is_file()
    elif command[0] == "nyala":
        from console.main import app

        assert CliRunner().invoke(app, [command[1], "--help"]).exit_code == 0
    else:
        assert command[:2] == ["python", "-m"]
        assert importlib.util.find_spec(f"{command[2]}.__main__") is not None


@pytest.mark.parametrize("name", sorted(ROLES))
def test_the_overrides_of_a_service_are_settings(name):
    flags = [argument.partition("=") for argument in SERVICES[name]["command"][3:]]
    (preset,) = [value for flag, _, value in flags if flag == "--config"]
    overrides = [value for flag, _, value in flags if flag == "--set"]

    load(ROOT / preset, overrides)


def test_health_checks_are_there_for_what_stays_up():
    staying = {name for name, service in SERVICES.items() if service["restart"] != "no"}

    assert staying == {*THEIRS, *ROLES}
    assert {name for name in staying if "healthcheck" in SERVICES[name]} == staying


def test_only_broker_and_learner_have_a_way_to_redis():
    holders = {
        name
        for name, service in SERVICES.items()
        if STORE_SECRETS & set(secrets_of(service)) or "REDIS" in str(service.get("environment"))
    }

    assert holders == {"redis", "broker", "learner", "learner-cuda"}


def test_a_secret_key_is_mounted_by_its_owner_alone():
    owners = {
        key: {name.removesuffix("-cuda") for name in SERVICES if key in secrets_of(SERVICES[name])}
        for key in ("broker.key", "learner.key", "enrolment.key")
    }

    assert owners == {
        "broker.key": {"broker"},
        "learner.key": {"learner"},
        "enrolment.key": {"actor"},
    }


def test_only_the_dashboard_is_published_to_this_machine_and_nothing_runs_as_root():
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert ports == {"grafana": ["127.0.0.1:3000:3000"]}
    assert not [name for name in OURS if str(SERVICES[name]["user"]).startswith("0")]
    confined = {*OURS, "prometheus", "grafana"}
    assert not [name for name in confined if SERVICES[name]["cap_drop"] != ["ALL"]]


def test_the_cuda_services_differ_in_image_and_devices_alone():
    for role, others in (("learner", set()), ("actor", {"command"})):
        cpu, cuda = SERVICES[role], SERVICES[f"{role}-cuda"]

        differing = {key for key in cpu.keys() | cuda.keys() if cpu.get(key) != cuda.get(key)}
        assert differing == {"image", "build", "profiles", "deploy", "environment"} | others
        assert cuda["build"]["args"]["PROFILE"] == "cuda"
        assert set(cuda["environment"]) - set(cpu["environment"]) == {"CUDA_VISIBLE_DEVICES"}
        (device,) = cuda["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    actor, cuda = SERVICES["actor"]["command"], SERVICES["actor-cuda"]["command"]
    assert cuda[:3] == ["nyala", "actor", "--gpus=all"]
    assert cuda[3:] == actor[3:]


def test_every_card_is_placed_by_its_number():
    chosen = load_compose(NYALA_LEARNER_GPUS="0,1,2,3", NYALA_ACTOR_GPUS="4,5,6,7")["services"]

    cards = {
        name: service["environment"]["CUDA_VISIBLE_DEVICES"]
        for name, service in chosen.items()
        if "CUDA_VISIBLE_DEVICES" in service.get("environment", {})
    }
    assert cards == {"learner-cuda": "0,1,2,3", "actor-cuda": "4,5,6,7"}


def test_who_holds_weights_has_places_for_them_that_it_can_write():
    for name in sorted(ROLES - {"broker"}):
        service = SERVICES[name]
        mounts = {
            target: mode
            for _, target, mode in (
                (*mount.split(":"), "rw")[:3] for mount in service["volumes"] if mount[0] != "."
            )
        }
        for variable in ("NYALA_SCRATCH", "HF_HOME"):
            place = service["environment"][variable]
            assert mounts[place] == "rw"
            assert f" {place}" in (ROOT / "Dockerfile").read_text()  # else root owns the volume
        assert service["environment"]["HF_TOKEN_PATH"] == secrets_of(service)["hf_token"]
        assert (service["shm_size"], service["ipc"]) == ("2gb", "private")
    for name, value in (("shm_size", "70gb"), ("ipc", "host")):
        chosen = load_compose(NYALA_SHM_SIZE="70gb", NYALA_IPC="host")["services"]
        assert {chosen[role][name] for role in ROLES} == {value}


def test_redis_keeps_everything_and_evicts_nothing():
    lines = (ROOT / "configs" / "deploy" / "redis.conf").read_text().splitlines()

    assert {"appendonly yes", "appendfsync everysec", "maxmemory-policy noeviction"} <= set(lines)
    assert [line for line in lines if line.startswith("maxmemory ")]
    assert not [line for line in lines if line.startswith("requirepass")]


def test_images_are_pinned():
    dockerfile = (ROOT / "Dockerfile").read_text()
    (base,) = [line.split()[1] for line in dockerfile.splitlines() if line.startswith("FROM ")]

    for image in (base, *(SERVICES[name]["image"] for name in THEIRS)):
        version = image.partition(":")[2].partition("-")[0]
        assert version.count(".") == 2, f"{image} must name major, minor and patch"


def test_the_image_installs_as_a_checkout_does():
    dockerfile = (ROOT / "Dockerfile").read_text()

    assert "RUN ./run setup" in dockerfile
    assert "pip install" not in dockerfile
    assert dockerfile.index("USER nyala") < dockerfile.index("RUN ./run setup")


@pytest.mark.parametrize("waits_for", [None, "its store"])
def test_the_health_check_asks_the_role_whether_it_is_ready(waits_for, tmp_path):
    run = RunSettings(name="r", directory=tmp_path, model="init")
    health = Health(Pulse(60), lambda: waits_for)
    with serving("http://127.0.0.1:0", (), dict, health, run=run, role="broker", name="broker"):
        (page,) = RunFolder(run.folder).metrics_pages().values()
        port = str(host_and_port(page)[1])

        assert checked(port) == (waits_for is not None)
    assert checked(port) == 1  # nobody listens


def checked(port):
    script = ROOT / "configs" / "deploy" / "healthcheck.py"
    done = subprocess.run([sys.executable, script, port], check=False, timeout=60)
    return done.returncode


def test_what_watches_is_given_the_files_of_the_repository():
    document = load_compose()

    for name in ("prometheus", "grafana"):
        assert document["services"][name]["profiles"] == ["monitoring"]
        for mount in document["services"][name]["configs"]:
            assert (ROOT / document["configs"][mount["source"]]["file"]).is_file()
