"""GPUs and threads of each process."""

import pytest

from configs.settings import RunSettings, Settings
from console.run.plan import actor_gpus, environment_of, learner_gpus, shared_card_warning


def settings(*, ranks=1, size=1, device="auto"):
    base = Settings(run=RunSettings(model="m"))
    return base.model_copy(
        update={
            "learner": base.learner.model_copy(update={"ranks": ranks, "device": device}),
            "actors": base.actors.model_copy(update={"tensor_parallel_size": size, "threads": 3}),
        }
    )


@pytest.mark.parametrize(
    ("gpus", "ranks", "size", "learner", "actors"),
    [
        ("", 1, 1, "", ["", ""]),
        ("0", 1, 1, "0", ["0", "0"]),
        ("01", 1, 1, "0", ["1", "1"]),
        ("0123", 2, 1, "01", ["2", "3", "2"]),
        ("01234567", 4, 2, "0123", ["45", "67", "45"]),
        ("012", 1, 2, "0", ["12", "12"]),
        ("01", 1, 2, "0", ["01"]),
    ],
)
def test_the_learner_comes_first_and_actors_share_the_rest(gpus, ranks, size, learner, actors):
    chosen = settings(ranks=ranks, size=size)

    assert "".join(learner_gpus(chosen, gpus)) == learner
    assert ["".join(actor_gpus(chosen, gpus, n)) for n in range(len(actors))] == actors


def test_a_learner_on_the_cpu_leaves_the_gpus_to_the_actors():
    chosen = settings(device="cpu")

    assert learner_gpus(chosen, "01") == []
    assert [actor_gpus(chosen, "01", n) for n in range(3)] == [["0"], ["1"], ["0"]]


@pytest.mark.parametrize(
    ("gpus", "actors", "shared"),
    [
        ("0", {}, "share GPU 0, and the actor counts"),
        ("0", {"kv_cache_gib": 4}, None),
        ("0", {"engine": "torch"}, None),
        ("0", {"count": 0}, None),
        ("01", {}, None),
        ("", {}, None),
    ],
)
def test_an_actor_that_would_measure_memory_beside_the_learner_is_warned_of(gpus, actors, shared):
    base = settings()
    chosen = base.model_copy(update={"actors": base.actors.model_copy(update=actors)})

    warning = shared_card_warning(chosen, gpus)

    assert (warning is None) if shared is None else (warning is not None and shared in warning)


def test_threads_are_limited_and_an_actor_never_sees_redis():
    inherited = {
        "NYALA_REDIS_URL": "redis://secret",
        "NYALA_REDIS_URL_FILE": "/run/secrets/redis.url",
        "OMP_NUM_THREADS": "64",
        "HOME": "/h",
    }

    actor = environment_of("actor", settings(), gpus=["4", "5"], inherited=inherited)
    learner = environment_of("learner", settings(), inherited=inherited)

    assert actor["OMP_NUM_THREADS"] == "3"
    assert actor["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert actor["HOME"] == "/h"
    assert not [name for name in actor if "REDIS" in name]
    assert learner["OMP_NUM_THREADS"] == "1"
    assert learner["NYALA_REDIS_URL"] == "redis://secret"
    assert learner["NYALA_REDIS_URL_FILE"] == "/run/secrets/redis.url"
