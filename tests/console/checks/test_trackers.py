"""Trackers that cannot work on this machine are refused before anything starts."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from pydantic import ValidationError

from configs.errors import SettingsError
from configs.loader import load
from configs.settings import Settings
from console.run.checks.machine import check_trackers
from console.run.redis_server import free_port


def with_trackers(**trackers: object) -> Settings:
    return Settings.model_validate({"run": {"model": "init"}, "trackers": trackers})


def check(settings: Settings) -> str:
    return check_trackers(settings.trackers, settings.run)


@pytest.fixture
def other_server():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>welcome</html>")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    for name, value in (("tensorboard", True), ("wandb", {})):
        with pytest.raises(
            SettingsError, match=f"trackers.{name} must have .*: .*pip install .*{name}"
        ):
            check(with_trackers(**{name: value}))


def test_wandb_online_needs_a_key(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    online = with_trackers(wandb={"mode": "online"})

    with pytest.raises(SettingsError, match="set WANDB_API_KEY, or run `wandb login`"):
        check(online)
    assert check(with_trackers(wandb={})) == "wandb"
    monkeypatch.setenv("WANDB_API_KEY", "k")
    check(online)


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_server_that_is_not_there_or_another_one_is_refused(name, other_server):
    nowhere = f"http://127.0.0.1:{free_port()}"

    for url in (nowhere, other_server):
        with pytest.raises(
            SettingsError, match=f"trackers.{name}.url must be .* got {url} .*=null"
        ):
            check(with_trackers(**{name: {"url": url}}))


def test_an_address_with_a_password_is_refused_without_it():
    with pytest.raises(ValidationError, match="set MLFLOW_TRACKING_TOKEN, or MLFLOW_") as refusal:
        with_trackers(mlflow={"url": "http://ana:secret@127.0.0.1:5000"})
    assert "secret" not in str(refusal.value.errors()[0]["msg"])
    with pytest.raises(
        ValueError, match=r"trackers.trackio.url must be .* such as http://.* got x"
    ):
        with_trackers(trackio={"url": "x:1"})


def test_a_wrong_key_or_value_of_a_tracker_is_named(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("run: {model: init}\ntrackers: {mlflow: {uri: x}, wandb: {mode: of}}\n")

    with pytest.raises(SettingsError) as refusal:
        load(path)

    text = str(refusal.value)
    assert "$.trackers.mlflow.uri is not a setting" in text
    assert "$.trackers.wandb.mode must be one of offline, online" in text
