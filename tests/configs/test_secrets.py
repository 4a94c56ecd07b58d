"""The URL of Redis: its sources, their order, and the secret file's permissions."""

import stat
from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.secrets import redis_url, write_secret
from configs.settings import BufferSettings, RunSettings, Settings


def settings_in(folder: Path, url: str | None = None) -> Settings:
    return Settings(
        run=RunSettings(model="m", name="r", directory=folder), buffer=BufferSettings(url=url)
    )


def test_environment_then_file_then_settings(tmp_path):
    settings = settings_in(tmp_path, "redis://settings")

    assert redis_url(settings.run, settings.buffer, {}) == "redis://settings"
    write_secret(settings.run.folder / "redis.url", "redis://file")
    assert redis_url(settings.run, settings.buffer, {}) == "redis://file"
    assert (
        redis_url(settings.run, settings.buffer, {"NYALA_REDIS_URL": "redis://environment"})
        == "redis://environment"
    )


def test_without_any_of_the_three_the_error_says_what_to_do(tmp_path):
    settings = settings_in(tmp_path)

    with pytest.raises(
        SettingsError, match=r"buffer\.url must be .* start the run with `nyala up`"
    ):
        redis_url(settings.run, settings.buffer, {})


def test_a_file_of_the_run_that_cannot_be_read_is_a_wrong_setting(tmp_path):
    settings = settings_in(tmp_path, "redis://settings")
    (settings.run.folder / "redis.url").mkdir(parents=True)  # root may read any file, but no folder

    with pytest.raises(
        SettingsError, match=r"redis\.url must be a file that this process can read"
    ):
        redis_url(settings.run, settings.buffer, {})


def test_a_secret_is_readable_by_its_owner_alone(tmp_path):
    path = tmp_path / "keys" / "secret"

    write_secret(path, "one")
    write_secret(path, "two")

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == "two\n"
    assert [file.name for file in path.parent.iterdir()] == ["secret"]


def test_the_environment_may_name_a_file_instead(tmp_path):
    secret = tmp_path / "mounted"
    secret.write_text("redis://mounted\n")
    settings = settings_in(tmp_path, "redis://settings")

    assert (
        redis_url(settings.run, settings.buffer, {"NYALA_REDIS_URL_FILE": str(secret)})
        == "redis://mounted"
    )
    with pytest.raises(SettingsError, match=r"NYALA_REDIS_URL_FILE must name .* No such file"):
        redis_url(settings.run, settings.buffer, {"NYALA_REDIS_URL_FILE": str(tmp_path / "absent")})
