"""Everything that is refused before anything starts: real sockets, real Redis, real files."""

import importlib.util
import socket
from urllib.parse import urlsplit

import pytest
import redis

from actors.engine.tokenizer import ModelTokenizer
from actors.environments import registry
from actors.environments.base import Score, Segment, Step
from buffer.admin import forget_run
from configs.errors import NyalaError, SettingsError
from configs.settings import ActorSettings, ParallelSettings, RunSettings, Settings
from console.run import preflight
from console.run.checks import model as model_checks
from console.run.checks import reward as reward_checks
from console.run.checks.machine import check_addresses, check_keys
from console.run.checks.store import check_redis
from console.run.redis_server import free_port
from tests.buffer.support.servers import server_in_cluster_mode, watched_pair
from tests.learner.support.tiny_policy import save_tiny_model

GOOD_REWARD = "def score(completion, answer):\n    return float(completion == answer)\n"


def settings(table="run", **keys):
    base = Settings(
        run=RunSettings(model="init", environment="calculator"),
        actors=ActorSettings(engine="torch"),
    )
    changed = getattr(base, table).model_copy(update=keys)
    return base.model_copy(update={table: changed})


def test_good_settings_pass():
    preflight.refuse_what_cannot_run(settings("actors", engine="torch"), redis_url=None)


def test_auto_chooses_an_engine_that_is_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    check = model_checks.check_engine

    assert check(settings("actors", engine="auto")).startswith("torch: vLLM is not installed")
    assert check(settings("actors", engine="torch")) == "torch"
    with pytest.raises(SettingsError, match=r"actors\.engine must be .* vLLM is not installed"):
        check(settings("actors", engine="vllm"))


def test_the_small_engine_in_the_place_of_vllm_is_warned_of(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    (warning,) = preflight.doubts_about(settings("actors", engine="auto"), redis_url=None)

    assert warning.startswith("actors sample with the small engine")
    assert "vLLM is not installed" in warning
    assert preflight.doubts_about(settings("actors", engine="torch"), redis_url=None) == []


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        endpoint = f"tcp://127.0.0.1:{squatter.getsockname()[1]}"

        with pytest.raises(SettingsError, match=f"must be an address that is free .* {endpoint}"):
            check_addresses(settings("broker", endpoint=endpoint))
    check_addresses(settings("broker", endpoint=endpoint))
    check_addresses(settings("broker", endpoint="tcp://127.0.0.1:0"))
    with pytest.raises(SettingsError, match="is in use or not of this machine"):
        check_addresses(settings("broker", endpoint="tcp://192.0.2.1:5757"))


def test_a_wrong_password_of_redis_is_refused_and_changes_nothing(redis_url):
    parts = urlsplit(redis_url)
    wrong = f"redis://:wrong@{parts.hostname}:{parts.port}/0"

    with pytest.raises(SettingsError, match="Redis refused the password") as refusal:
        check_redis(settings().run, wrong)

    assert "wrong@" not in str(refusal.value)
    check_redis(settings().run, redis_url)
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0


def test_a_redis_that_is_not_there_is_refused():
    with pytest.raises(SettingsError, match="cannot be reached"):
        check_redis(settings().run, f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(SettingsError, match=r"must begin with one of redis://.*got 'http"):
        check_redis(settings().run, "http://127.0.0.1")


def test_a_redis_that_sentinels_watch_is_taken(tmp_path):
    with watched_pair(tmp_path) as (_, _, url):
        check_redis(settings().run, url)
        doubts = preflight.doubts_about(settings(), redis_url=url)
        assert not [text for text in doubts if "known holes" in text]
        assert [text for text in doubts if "appendonly of the Redis server must be yes" in text]
        assert forget_run(url, "run") == 0
        with pytest.raises(
            SettingsError, match="must be a Redis server that accepts this connection"
        ):
            check_redis(settings().run, url.replace("/nyala/", "/another/"))


def test_a_redis_in_cluster_mode_is_refused(tmp_path):
    with (
        server_in_cluster_mode(tmp_path / "node") as url,
        pytest.raises(SettingsError, match=r"^buffer\.url must .*got a server in cluster mode"),
    ):
        preflight.refuse_what_cannot_run(settings(), redis_url=url)
    with pytest.raises(SettingsError, match=r"got 'redis\+cluster://\*\*\*@n1:1,n2:2'; name one"):
        check_redis(settings().run, "redis+cluster://:secret@n1:1,n2:2")


def test_incomplete_keys_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="make keys with `nyala keys"):
        check_keys(settings("broker", keys=tmp_path).broker)


@pytest.mark.parametrize(
    ("files", "answer"),
    [
        (None, "which does not exist"),
        ([], "without a config.json"),
        (["config.json"], "must have its weights as .safetensors"),
    ],
)
def test_a_directory_without_a_model_is_refused(tmp_path, files, answer):
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).touch()

    with pytest.raises(SettingsError, match=answer):
        model_checks.check_model(settings(model=str(folder)).run)


def test_a_directory_with_a_model_passes(tmp_path):
    save_tiny_model(tmp_path)

    model_checks.check_model(settings(model=str(tmp_path)).run)
    with pytest.raises(SettingsError, match=r"run.system_prompt must not be set"):
        model_checks.check_model(settings(model=str(tmp_path), system_prompt="be brief").run)


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        ('{"architectures": ["LlavaForConditionalGeneration"]}', "got LlavaForConditional"),
        ('{"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}', "with 8 experts"),
        ('{"architectures": ["FalconH1ForCausalLM"], "lm_head_multiplier": 0.1}', "lm_head_multi"),
        ('{"quantization_config": {"quant_method": "awq"}}', "a quantization_config"),
        ('{"architectures": ', "config.json that can be read"),
        ("[]", "a JSON object as its config.json"),
        (
            '{"original_max_position_embeddings": 512, "rope_scaling": {"type": "longrope"}}',
            r"run.max_prompt_tokens \+ run.max_completion_tokens must be <= 512",
        ),
        (
            '{"model_type": "cohere2", "sliding_window": 512}',
            r"run.max_prompt_tokens \+ run.max_completion_tokens must be <= 512",
        ),
        ('{"architectures": ["LlamaForCausalLM"]}', "must have a tokenizer beside its weights"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_by_name(tmp_path, config, answer):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").touch()

    with pytest.raises(SettingsError, match=answer):
        model_checks.check_model(settings(model=str(tmp_path)).run)


def test_a_name_that_the_hub_does_not_have_is_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(SettingsError, match=r"got 'no/such': there is no such directory, and the"):
        model_checks.check_model(settings(model="no/such").run)


def test_a_hub_out_of_reach_is_asked_once_and_said_once(monkeypatch):
    asked = []

    class Session:
        def head(self, url, *, timeout):
            asked.append((url, timeout))
            raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.get_session", Session)

    def download(*_, **__):
        raise AssertionError("it tries again for a minute")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", download)

    with pytest.raises(SettingsError, match=r"cannot be reached: .*no route to host") as refusal:
        preflight.refuse_what_cannot_run(settings(model="no/such"), redis_url=None)

    assert "things are in the way" not in str(refusal.value)
    assert len(asked) == 1


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(model_checks, "HUB_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)

        with pytest.raises(SettingsError, match=f"the hub cannot be reached: {url}"):
            model_checks.check_model(settings(model="no/such").run)


def test_a_model_that_was_fetched_before_needs_no_hub(tmp_path, monkeypatch):
    kept = tmp_path / "config.json"
    kept.write_text("{}")
    monkeypatch.setattr(model_checks, "hub_is_away", lambda: "no route to host")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(kept))

    assert model_checks.model_config(settings(model="there/before").run) == {}


@pytest.mark.parametrize(
    ("files", "named", "answer"),
    [
        (["m.Q4_K_M.gguf"], "", r"which is GGUF; .*convert it.*gguf_file='m.Q4_K_M.gguf'\)"),
        (["m.gguf"], "m.gguf", r"which is GGUF; .*gguf_file='m.gguf'\).save_pretrained"),
        (["gguf/m.gguf"], "gguf", r"which is GGUF; .*/gguf', gguf_file='m.gguf'\)"),
        (["model.safetensors"], "model.safetensors", "which is a file; name the folder"),
        (["adapter_config.json", "adapter_model.safetensors"], "", "is an adapter; merge it"),
    ],
)
def test_other_files_of_a_model_are_named_with_what_makes_a_directory(
    tmp_path, files, named, answer
):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    with pytest.raises(SettingsError, match=answer) as refusal:
        preflight.refuse_what_cannot_run(settings(model=str(tmp_path / named)), redis_url=None)

    assert "things are in the way" not in str(refusal.value)


def test_a_directory_without_a_tokenizer_has_one_remedy(tmp_path):
    save_tiny_model(tmp_path)
    for name in model_checks.TOKENIZER_FILES:
        (tmp_path / name).unlink(missing_ok=True)

    with pytest.raises(SettingsError, match=r"save it there with the tok") as refusal:
        preflight.refuse_what_cannot_run(settings(model=str(tmp_path)), redis_url=None)

    assert "init-model" not in str(refusal.value)
    assert "things are in the way" not in str(refusal.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=r"save it there with the tokenizer's `save_pre"):
        ModelTokenizer(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (None, "there is no"),
        ("def other(): ...", "a function of"),
        ("def score(:", "SyntaxError"),
        ("def score(x): return 1.0", "of the form"),
        ("def score(completion, answer): return 'much'", "must be a float"),
        ("def score(completion, answer): raise OSError('gone')", "gone"),
    ],
)
def test_a_bad_reward_file_is_refused(tmp_path, text, answer):
    path = tmp_path / "reward.py"
    if text is not None:
        path.write_text(text)

    with pytest.raises(NyalaError, match=answer):
        reward_checks.check_reward(settings(reward=f"{path}:score"))


def test_a_weight_of_a_part_that_no_example_has_is_warned_of(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(GOOD_REWARD)
    reward = f"{path}:score"

    for good in ({"exact": 1.0, "used_tool": 0.5}, {"score": 1.0}, {"environment": 1.0}):
        given = settings("rewards", weights=good)
        run = given.run.model_copy(update={"reward": reward})
        assert reward_checks.parts_warning(given.model_copy(update={"run": run})) is None
    warning = reward_checks.parts_warning(settings("rewards", weights={"exakt": 1.0}))
    assert warning is not None
    assert "got exakt, which examples lack (they have exact, used_tool);" in warning
    for good_metric in ("exact", "reward", "used_tool"):
        assert reward_checks.parts_warning(settings(eval_metric=good_metric)) is None
    unknown = str(reward_checks.parts_warning(settings(eval_metric="accuracy")))
    assert "run.eval_metric must name parts of the reward" in unknown
    assert (
        "correct it: a part that no answer has is replaced by the reward in evaluations" in unknown
    )


class TwoTurns:
    """An item that is judged after its second turn, and has a part only after a tool's use."""

    prompt, answer = "?", "42"
    demonstration = (Segment("call", True), Segment("result", False), Segment("42", True))

    def __init__(self):
        self.turns = []

    def begin(self, _index, _seed, *, held_out):
        assert not held_out
        return TwoTurns()

    def step(self, text):
        self.turns.append(text)
        return Step("result", done=len(self.turns) == 2)

    def score(self):
        assert len(self.turns) == 2, "judged before its end"
        return Score(1.0, {"tool": 1.0} if "call" in self.turns else {})


def test_an_item_of_several_turns_is_judged_at_its_end_alone(monkeypatch):
    monkeypatch.setattr(registry, "make_environment", lambda _run: TwoTurns())

    assert reward_checks.parts_warning(settings("rewards", weights={"tool": 1.0})) is None


def test_echoes_are_refused_for_an_environment_of_several_turns(monkeypatch):
    monkeypatch.setattr(registry, "make_environment", lambda _run, **_: TwoTurns())

    def check(echo):
        given = settings("learner", warm_start_echo=echo)
        run = given.run.model_copy(update={"eval_episodes": 0})
        reward_checks.check_reward(given.model_copy(update={"run": run}))

    check(0.0)
    with pytest.raises(SettingsError, match=r"warm_start_echo must be 0 .* got 0\.5 for calc"):
        check(0.5)


def test_a_good_reward_file_passes(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(GOOD_REWARD)

    reward_checks.check_reward(settings(reward=f"{path}:score"))


def test_each_environment_of_several_is_checked_and_the_bad_one_is_named(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(GOOD_REWARD)
    good = {"name": "good", "environment": "calculator", "reward": f"{path}:score"}
    bad = {"name": "bad", "environment": "calculator", "environment_settings": {"operand": 3}}

    def check(*environments):
        run = RunSettings(model="init", environments=environments)
        reward_checks.check_reward(Settings(run=run))

    check(good)
    check(good, {"environment": "calculator", "share": 0})
    with pytest.raises(SettingsError, match=r"^bad: run\.environment_settings\.operand must"):
        check(good, bad)
    with pytest.raises(NyalaError, match=r"^good: run\.reward must be a function of"):
        check(good | {"reward": f"{path}:none"})


def test_ranks_and_heads_that_cannot_be_divided_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 6, "num_key_value_heads": 2}')
    two = settings("learner", ranks=4).model_copy(update={"parallel": ParallelSettings(sequence=4)})
    model = two.run.model_copy(update={"model": str(tmp_path)})

    model_checks.check_parallel(two)
    with pytest.raises(SettingsError, match=r"parallel\.replicate must divide .* = 1"):
        model_checks.check_parallel(settings("parallel", replicate=2))
    with pytest.raises(
        SettingsError, match="must divide the 6 attention heads of the model, got 4"
    ):
        model_checks.check_parallel(two.model_copy(update={"run": model}))


def test_all_that_is_in_the_way_is_listed_at_once(tmp_path):
    wrong = settings(model=str(tmp_path / "absent"), environment="no_such")

    with pytest.raises(SettingsError) as refusal:
        preflight.refuse_what_cannot_run(wrong, redis_url="redis://127.0.0.1:1/0")

    text = str(refusal.value)
    assert text.startswith("3 things are in the way; nothing was started:")
    for setting in ("buffer.url", "run.model", "run.environment"):
        assert f"\n  {setting} must be" in text
