"""All rules of settings together; those between tables, of the fleet and of addresses.

`Settings` calls `disagreements`.
"""

from __future__ import annotations

import re

from configs.errors import FIRST_FREE_CODE
from configs.tables.all_tables import AllTables
from configs.tables.environments import BLOCK
from configs.tables.run import UNIFORM
from configs.weight_path import is_closed

from .algorithm import (
    algorithm_disagreements,
    critic_disagreements,
    reference_disagreements,
    teacher_disagreements,
)
from .learner import deterministic_disagreements, learner_disagreements
from .store import store_disagreements

WITHOUT_GROUPS = ("reinforce_pp", "gae", "vtrace")
"""Advantages that do not compare the members of a group."""


def disagreements(settings: AllTables) -> list[str]:
    """List what is wrong between the tables, each with what to change."""
    checks = (
        _check_publish_every,
        _check_max_model_len,
        _check_heartbeat,
        _check_pass_k,
        _check_overlong_buffer,
        _check_zero_variance_filter,
        _check_reward_names,
        _check_environment_names,
        _check_environment_shares,
        _check_sampler_prompts,
        _check_pull_from,
        _check_site,
        _check_broadcast_network,
        _check_keep_best,
        _check_exit_codes,
        _check_concurrent_episodes,
        _check_process_of_tensor_parallel,
    )
    between_tables = [text for check in checks if (text := check(settings)) is not None]
    mathematics = algorithm_disagreements(settings) + critic_disagreements(settings)
    mathematics += reference_disagreements(settings) + teacher_disagreements(settings)
    rest = learner_disagreements(settings) + fleet_disagreements(settings)
    rest += store_disagreements(settings) + server_disagreements(settings)
    return between_tables + mathematics + rest + deterministic_disagreements(settings)


def _check_publish_every(settings: AllTables) -> str | None:
    longest = settings.run.max_policy_lag + 1
    if settings.learner.publish_every <= longest:
        return None
    return (
        f"learner.publish_every must be <= run.max_policy_lag + 1 = {longest}, "
        f"got {settings.learner.publish_every}; "
        f"actors would only ever make episodes that are too old: lower it"
    )


def _check_max_model_len(settings: AllTables) -> str | None:
    longest = settings.run.max_prompt_tokens + settings.run.max_completion_tokens
    if settings.actors.max_model_len is None or settings.actors.max_model_len >= longest:
        return None
    return (
        f"actors.max_model_len must be >= run.max_prompt_tokens + run.max_completion_tokens = "
        f"{longest}, got {settings.actors.max_model_len}; "
        f"raise it, or leave it null for that sum"
    )


def _check_heartbeat(settings: AllTables) -> str | None:
    beat_s, broker = settings.actors.heartbeat_s, settings.broker
    if 2 * beat_s >= broker.lease_timeout_s:
        return (
            f"actors.heartbeat_s must be < broker.lease_timeout_s / 2 = "
            f"{broker.lease_timeout_s / 2}, got {beat_s}; "
            f"one late heartbeat would give an actor's episodes to another: lower it"
        )
    if beat_s >= broker.heartbeat_timeout_s:
        return (
            f"actors.heartbeat_s must be < broker.heartbeat_timeout_s = "
            f"{broker.heartbeat_timeout_s}, got {beat_s}; "
            f"actors would get no leases between two heartbeats: lower it"
        )
    return None


def _check_exit_codes(settings: AllTables) -> str | None:
    for role, table in (("actors", settings.actors), ("learner", settings.learner)):
        if 0 < (code := table.exit_when_told) < FIRST_FREE_CODE:
            return (
                f"{role}.exit_when_told must be 0 or >= {FIRST_FREE_CODE}, got {code}; "
                f"codes between them are those of errors (docs/fleet.md): choose 0 or a higher one"
            )
    return None


def _check_concurrent_episodes(settings: AllTables) -> str | None:
    actors = settings.actors
    if actors.least_concurrent_episodes > actors.most_concurrent_episodes:
        return (
            f"actors.least_concurrent_episodes must be <= actors.most_concurrent_episodes = "
            f"{actors.most_concurrent_episodes}, got {actors.least_concurrent_episodes}; lower it"
        )
    if actors.max_concurrent_episodes != "auto":
        return None
    if actors.engine == "torch":
        return (
            "actors.max_concurrent_episodes must be a number or null with actors.engine torch, got "
            "auto; that engine has no KV cache of a fixed size: set a number"
        )
    if actors.max_episodes_in_flight is not None:
        return (
            f"actors.max_episodes_in_flight must be null where actors.max_concurrent_episodes is "
            f"auto, got {actors.max_episodes_in_flight}; the number that is found counts episodes "
            f"that wait for their environment too: set it to null"
        )
    return None


def _check_process_of_tensor_parallel(settings: AllTables) -> str | None:
    size = settings.actors.tensor_parallel_size
    if size == 1 or not settings.actors.in_process:
        return None
    return (
        f"actors.in_process must be null or false with actors.tensor_parallel_size {size}, got "
        f"true; each of its workers is a process: set it to null"
    )


def _check_pass_k(settings: AllTables) -> str | None:
    k, size = settings.algorithm.pass_k, settings.run.group_size
    if settings.algorithm.advantage != "pass_at_k" or k < size:
        return None
    return (
        f"algorithm.pass_k must be < run.group_size = {size}, got {k}; "
        f"with the whole group in every set no answer stands out: lower it"
    )


def _check_overlong_buffer(settings: AllTables) -> str | None:
    buffer, limit = settings.rewards.overlong_buffer_tokens, settings.run.max_completion_tokens
    if buffer <= limit:
        return None
    return (
        f"rewards.overlong_buffer_tokens must be <= run.max_completion_tokens = {limit}, "
        f"got {buffer}; even an empty completion would be punished: lower it"
    )


def _check_zero_variance_filter(settings: AllTables) -> str | None:
    if not settings.algorithm.filter_zero_variance:
        return None
    if settings.algorithm.advantage in WITHOUT_GROUPS:
        return (
            f"algorithm.advantage must compare the members of a group, "
            f"got {settings.algorithm.advantage}; groups of equal rewards teach it something: "
            f"set algorithm.filter_zero_variance to false"
        )
    if settings.run.group_size == 1:
        return (
            "run.group_size must be >= 2 where algorithm.filter_zero_variance is true, got 1; "
            "the rewards of a group of one are always equal: raise it, or set the filter to false"
        )
    return None


def _check_reward_names(settings: AllTables) -> str | None:
    for run in (settings.run, *settings.run.by_environment.values()):
        rewards = run.reward
        if isinstance(rewards, list) and len(run.reward_functions) != len(rewards):
            return (
                f"run.reward must name functions of different names, got {', '.join(rewards)}; "
                f"each is a part of the reward under its function's name: rename one"
            )
    return None


def _check_environment_names(settings: AllTables) -> str | None:
    run = settings.run
    if not run.environments:
        return None
    own_settings = (run.environment_settings, run.environment_requirements, run.environment_python)
    if any(own_settings) or run.environment != type(run).model_fields["environment"].default:
        return (
            f"run.environment must be left out where there is run.environments, got "
            f"{run.environment}; make it an entry of run.environments"
        )
    names = [environment.title for environment in run.environments]
    if len(set(names)) == len(names):
        return None
    return (
        f"run.environments must have different names, got {', '.join(names)}; give each a name "
        f"of its own, such as {{name: sums, environment: {run.environments[0].environment}}}"
    )


def _check_environment_shares(settings: AllTables) -> str | None:
    run = settings.run
    total = sum(environment.share for environment in run.environments)
    if not run.is_trained:
        return (
            "run.environments must have one with a share above 0, got only evaluated ones; "
            "give a share to what is to be trained"
        )
    few = [environment for environment in run.environments if 0 < environment.share < total / BLOCK]
    if not few:
        return None
    return (
        f"run.environments must have shares of at least a thousandth of their sum = {total:g}, or "
        f"0, got {few[0].share:g} of {few[0].title}; 0 = it is only evaluated"
    )


def _check_sampler_prompts(settings: AllTables) -> str | None:
    run = settings.run
    if run.sampler == UNIFORM:
        return None
    for name, alone in run.by_environment.items():
        if alone.is_trained and alone.sampler_prompts is None:
            return (
                f"run.sampler_prompts must be set where run.sampler is {run.sampler}, got null for "
                f"{name}; set it to the number of its training rows, or to how many questions of a "
                f"generator without an end are asked again and again"
            )
    return None


def _check_pull_from(settings: AllTables) -> str | None:
    pull_from = settings.actors.pull_from
    if "publisher" in pull_from:
        return None
    return (
        f"actors.pull_from must have publisher, got {', '.join(pull_from)}; every version comes "
        "from there first: add it at the end"
    )


def _check_site(settings: AllTables) -> str | None:
    actors = settings.actors
    if actors.site is None:
        return None
    if actors.share_endpoint is None:
        return (
            f"actors.share_endpoint must be set where actors.site is {actors.site}, got null; the "
            "others of that site fetch weights there: tcp://0.0.0.0:0 is any free port of this "
            "machine's network, tcp://127.0.0.1:0 one of the machine itself"
        )
    if "peers" not in actors.pull_from:
        return (
            f"actors.pull_from must have peers where actors.site is {actors.site}, "
            f"got {', '.join(actors.pull_from)}; put peers before publisher, or leave the site out"
        )
    return None


def _check_broadcast_network(settings: AllTables) -> str | None:
    if not settings.learner.broadcast or is_closed(settings.run, settings.learner):
        return None
    return (
        f"learner.broadcast must be null or false where run.trusted_network is false and "
        f"learner.publisher_endpoint is not on loopback ({settings.learner.publisher_endpoint}), "
        f"got true; whoever reaches a process group can read and write weights: leave it null, "
        f"or set run.trusted_network to true if nobody else is on that network"
    )


def _check_keep_best(settings: AllTables) -> str | None:
    run, every = settings.run, settings.learner.checkpoint_every
    if not settings.learner.keep_best or (run.eval_every and run.eval_every % every == 0):
        return None
    return (
        f"run.eval_every must be a multiple of learner.checkpoint_every = {every} with "
        f"learner.keep_best, got {run.eval_every}; what is evaluated has to be in a checkpoint: "
        f"choose a multiple of {every}"
    )


# --------------------------------------------------------------------------------------------------
# Rules of the fleet; returns texts with what to change.


def fleet_disagreements(settings: AllTables) -> list[str]:
    """List bounds that contradict each other, each with what to change."""
    fleet, texts = settings.fleet, []
    most = fleet.max_actors or settings.broker.max_actors
    if fleet.min_actors > most:
        name = "fleet.max_actors" if fleet.max_actors else "broker.max_actors"
        texts.append(
            f"fleet.min_actors must be <= {name} = {most}, got {fleet.min_actors}; lower it, or "
            f"raise {name}"
        )
    price = fleet.price_per_actor_hour
    if price is None:
        texts += [
            f"fleet.price_per_actor_hour must be set where {name} is, got null; set it, or "
            f"{name} to null"
            for name, value in (
                ("fleet.max_per_hour", fleet.max_per_hour),
                ("fleet.max_total", fleet.max_total),
            )
            if value is not None
        ]
    elif fleet.max_per_hour is not None and fleet.max_per_hour < price * fleet.min_actors:
        texts.append(
            f"fleet.max_per_hour must be >= fleet.price_per_actor_hour x fleet.min_actors = "
            f"{price * fleet.min_actors:g}, got {fleet.max_per_hour:g}; raise it, or lower "
            "fleet.min_actors"
        )
    return texts


# --------------------------------------------------------------------------------------------------
# Rules of the addresses of servers that get a run's figures, texts or traces.

ADDRESS = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
EXAMPLES = {
    "trackers.mlflow.url": "http://127.0.0.1:5000",
    "trackers.trackio.url": "http://127.0.0.1:7860",
    "run.tracing.endpoint": "http://127.0.0.1:4318",
}
VARIABLES = {
    "trackers.mlflow.url": "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD",
    "trackers.trackio.url": "TRACKIO_WRITE_TOKEN",
    "run.tracing.endpoint": "OTEL_EXPORTER_OTLP_HEADERS",
}
"""Where the key of a server is read from: never from settings, which are written down."""


def server_disagreements(settings: AllTables) -> list[str]:
    """List what is wrong about the servers, each with what to change."""
    mlflow, trackio = settings.trackers.mlflow, settings.trackers.trackio
    chosen = {
        "trackers.mlflow.url": mlflow.url if mlflow else None,
        "trackers.trackio.url": trackio.url if trackio else None,
        "run.tracing.endpoint": settings.run.tracing.endpoint,
    }
    checked = [_check_address(name, url) for name, url in chosen.items() if url is not None]
    return [text for text in checked if text is not None]


def _check_address(name: str, url: str) -> str | None:
    if "@" in url or "?" in url or "write_token=" in url:
        return (
            f"{name} must be without passwords and tokens, got one of "
            f"{len(url)} characters; set {VARIABLES[name]} in the environment"
        )
    if not ADDRESS.fullmatch(url):
        return f"{name} must be an address such as {EXAMPLES[name]}, got {url}; write it like this"
    return None
