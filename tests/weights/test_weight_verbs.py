"""`nyala weights` on a run whose publisher is alive, with a real store and a real pull."""

import json

import pytest
from typer.testing import CliRunner

from buffer import operations
from buffer.store import Store
from configs.loader import save
from configs.secrets import write_secret
from configs.settings import RunSettings, Settings
from console.main import app
from learner.weights.log import FILE_NAME
from tests.weights.support.plane import Plane

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    plane = Plane(tmp_path_factory.mktemp("verbs"), broadcast=False)
    plane.publish()
    yield plane
    plane.close()


@pytest.fixture
def folder(plane, redis_url):
    """The run of the plane, its publication in a store of its own."""
    settings = Settings(run=RunSettings(model="toy", name="toy", directory=plane.folder))
    settings = settings.model_copy(
        update={"broker": settings.broker.model_copy(update={"keys": plane.keys})}
    )
    folder = settings.run.folder
    save(settings, folder / "config.yaml")
    (folder / "redis.url").unlink(missing_ok=True)
    write_secret(folder / "redis.url", redis_url)
    with Store(redis_url, run="toy") as store:
        call = operations.begin_run(
            "h",
            {},
            units_per_batch=2,
            max_policy_lag=1,
            margin=1.0,
            group_size=2,
            min_group_size=1,
        )
        store.run(call)
        store.run(operations.begin_lineage(0, 0))
        publication = plane.publication
        fields = {
            "digest": publication.digest,
            "endpoint": publication.endpoint,
            "public_key": publication.public_key,
        }
        lineage, step = publication.version
        store.run(operations.publish(lineage, step, fields))
    return folder


def weights(*arguments: object):
    return CliRunner().invoke(app, ["weights", *map(str, arguments)])


def test_what_is_pulled_is_the_newest_version_and_verifies(plane, folder, tmp_path):
    file = tmp_path / "policy.safetensors"

    pulled = weights("pull", folder, "--to", file, "--json")

    assert pulled.exit_code == 0, pulled.output
    manifest = plane.publications[-1]
    assert json.loads(pulled.stdout)["digest"] == manifest.digest
    assert json.loads(pulled.stdout)["version"] == list(manifest.version)
    verified = weights("verify", folder, "--file", file)
    assert verified.exit_code == 0, verified.output
    assert f"{file} is version 1.{manifest.version.step}" in verified.stdout


def test_a_changed_byte_in_a_pulled_file_is_found(folder, tmp_path):
    file = tmp_path / "policy.safetensors"
    assert weights("pull", folder, "--to", file).exit_code == 0
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)

    refused = weights("verify", folder, "--file", file)

    assert refused.exit_code == 2
    assert "must hold version (1, 1) with digest" in refused.stderr
    file.write_bytes(b"nothing")
    assert (
        "must be a file of `nyala weights pull`" in weights("verify", folder, "--file", file).stderr
    )


def test_the_log_lists_versions_with_what_became_of_them(plane, folder):
    version = plane.publish().version
    plane.deliveries(until=version)

    shown = weights("log", folder, "-n", 1, "--json")

    (row,) = json.loads(shown.stdout)["versions"]
    assert row["version"] == f"1.{version.step}"
    assert row["digest"] == plane.publication.digest[:12]
    assert row["learner held, s"] > 0
    assert f"{version.step} versions published" in weights("log", folder).stdout


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda line: {**line, "digest": "0" * 64}, r"version (1, 1) must have one digest, got"),
        (lambda line: {**line, "version": [0, 9]}, r"versions must increase, got (0, 9) after"),
    ],
    ids=["overwritten", "going back"],
)
def test_a_version_that_was_overwritten_is_found(plane, tmp_path, edit, message):
    settings = Settings(run=RunSettings(model="toy", name="odd", directory=tmp_path))
    folder = settings.run.folder
    save(settings, folder / "config.yaml")
    first = (plane.folder / "toy" / FILE_NAME).read_text().splitlines()[0]
    (folder / FILE_NAME).write_text(first + "\n" + json.dumps(edit(json.loads(first))) + "\n")

    refused = weights("verify", folder)

    assert refused.exit_code == 2
    assert message in refused.stderr


def test_a_run_that_has_published_nothing_says_so(tmp_path, redis_url):
    settings = Settings(run=RunSettings(model="toy", name="new", directory=tmp_path))
    save(settings, settings.run.folder / "config.yaml")
    write_secret(settings.run.folder / "redis.url", redis_url)

    refused = weights("pull", settings.run.folder, "--to", tmp_path / "x")

    assert refused.exit_code == 2
    assert (
        "must have published weights, got none; look at its learner with `nyala logs`"
        in refused.stderr
    )
    assert "0 versions published" in weights("log", settings.run.folder).stdout
