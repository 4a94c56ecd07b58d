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
from configs.metrics import Health, Pulse, host_and_port
from configs.metrics_serving import serving
from configs.settings import RunSettings
from console.run.run_folder import RunFolder
from tests.packaging.support.compose_file import ROOT, load_compose, mounts_of

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
    else:
        from console.main import app

        assert command[0] == "nyala"
        assert CliRunner().invoke(app, [command[1], "--help"]).exit_code == 0


@pytest.mark.parametrize("name", sorted(ROLES))
def test_the_overrides_of_a_service_are_settings(name):
    flags = [word.partition("=") for word in SERVICES[name]["command"] if "=" in word]
    (preset,) = [value for flag, _, value in flags if flag == "--config"]
    overrides = [value for flag, _, value in flags if flag == "--set"]

    load(ROOT / preset, overrides)


def test_health_checks_are_there_for_what_stays_up():
    staying = {name for name, service in SERVICES.items() if service["restart"] != "no"}

    assert staying == {*THEIRS, *ROLES}
    assert {name for name in staying if "healthcheck" in SERVICES[name]} == staying


def test_only_broker_and_learner_have_a_way_to_redis():
    holders = {name for name in SERVICES if "REDIS" in str(SERVICES[name].get("environment"))}
    assert holders == {"broker", "learner", "learner-cuda"}

    holders = {name for name in SERVICES if "redis-password" in volumes_of(name)}
    assert holders == {"redis", "secrets"}


def test_a_collectors_key_goes_to_those_that_trace_and_only_where_it_is_set():
    name = "OTEL_EXPORTER_OTLP_HEADERS"
    given = {each: SERVICES[each].get("environment", {}) for each in SERVICES}

    assert {each for each, variables in given.items() if name in variables} == ROLES
    assert all(given[each][name] is None for each in ROLES), "compose's form of: as it is here"


def test_a_secret_key_is_mounted_by_its_owner_alone():
    for role in ("broker", "learner", "actor"):
        holders = {name for name in SERVICES if f"{role}-keys" in volumes_of(name)}

        assert holders - {f"{role}-cuda"} == {"secrets", role}
        source, _ = mounts_of(SERVICES[role])["/srv/nyala/keys"]
        assert source == f"{role}-keys"


def volumes_of(name):
    return {source for source, _ in mounts_of(SERVICES[name]).values()}


def test_of_two_services_that_write_a_volume_neither_can_change_what_the_other_proves_itself_with():
    writers = {
        volume: {
            name.removesuffix("-cuda")
            for name in SERVICES
            if (volume, "rw") in mounts_of(SERVICES[name]).values()
        }
        for volume in ("broker-keys", "learner-keys", "actor-keys", "redis-password", "allowed")
    }

    assert writers == {
        "broker-keys": {"secrets", "broker"},
        "learner-keys": {"secrets"},
        "actor-keys": {"secrets"},
        "redis-password": {"secrets"},
        "allowed": {"secrets", "broker"},
    }


def test_one_command_makes_keys_and_password_before_anything_needs_them():
    waiting = {name: set(service.get("depends_on", {})) for name, service in SERVICES.items()}
    first = "secrets"

    def needs(name):
        return set.union(waiting[name], *(needs(other) for other in waiting[name]))

    assert {name for name in SERVICES if first in needs(name)} == {"redis", "model", *ROLES}
    for service in SERVICES.values():
        if first in service.get("depends_on", {}):
            condition = service["depends_on"][first]["condition"]
            assert condition == "service_completed_successfully"


def test_every_container_is_confined_and_bounded():
    for name in OURS:
        service = SERVICES[name]
        assert service["read_only"] is True
        assert service["pids_limit"] > 0
        assert name == "secrets" or service["mem_limit"]
    for service in SERVICES.values():
        assert {"max-size", "max-file"} == set(service["logging"]["options"])


def test_a_folder_of_ones_own_is_seen_by_all_who_read_the_settings():
    chosen = load_compose(NYALA_WORK="./mine", NYALA_CONFIG="work/mine.yaml")["services"]

    for name in {"model", *ROLES}:
        assert mounts_of(chosen[name])["/srv/nyala/work"] == ("./mine", "ro")
        assert "work/mine.yaml" in str(chosen[name]["command"])


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
        assert (
            differing
            == {"image", "build", "pull_policy", "profiles", "deploy", "environment"} | others
        )
        assert cuda["build"]["args"]["PROFILE"] == "cuda"
        assert set(cuda["environment"]) - set(cpu["environment"]) == {"CUDA_VISIBLE_DEVICES"}
        (device,) = cuda["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    actor, cuda = SERVICES["actor"]["command"], SERVICES["actor-cuda"]["command"]
    assert cuda == [*actor[:2], "--gpus=all", *actor[2:]]


def test_every_card_is_placed_by_its_number():
    chosen = load_compose(NYALA_LEARNER_GPUS="0,1,2,3", NYALA_ACTOR_GPUS="4,5,6,7")["services"]

    cards = {
        name: service["environment"]["CUDA_VISIBLE_DEVICES"]
        for name, service in chosen.items()
        if "CUDA_VISIBLE_DEVICES" in service.get("environment", {})
    }
    assert cards == {"learner-cuda": "0,1,2,3", "actor-cuda": "4,5,6,7"}


def test_volumes_belong_to_the_user_of_the_image():
    made = (ROOT / "Dockerfile").read_text().partition("install --directory")[2]
    owned = set(made.partition("USER")[0].split())

    for name in OURS:
        for target, (source, mode) in mounts_of(SERVICES[name]).items():
            assert target in owned or mode == "ro", f"{source} of {name} would be root's"


def test_who_holds_weights_has_places_for_them_that_it_can_write():
    for name in sorted(ROLES - {"broker"}):
        service = SERVICES[name]
        for variable in ("NYALA_SCRATCH", "HF_HOME"):
            _, mode = mounts_of(service)[service["environment"][variable]]
            assert mode == "rw"
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

    assert dockerfile.count("./run setup\n") == 1  # without developers' tools
    assert "pip install" not in dockerfile
    assert "USER 1000\n" in dockerfile  # a number: Kubernetes' runAsNonRoot takes no name
    assert dockerfile.index("USER 1000") < dockerfile.index("./run setup")


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
