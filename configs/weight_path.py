"""Path that weights take from the learner to actors elsewhere: process groups, or pulls over CURVE.

A process group neither authenticates nor encrypts, so it is used where only this machine can reach
the publisher, or where a person says that the network is trusted.
"""

from __future__ import annotations

import ipaddress

from .tables.learner import LearnerSettings
from .tables.run import RunSettings


def uses_groups(run: RunSettings, learner: LearnerSettings) -> bool:
    """Return whether weights are sent over process groups."""
    if learner.broadcast is not None:
        return learner.broadcast
    return learner.advertise is None and is_closed(run, learner)


def is_closed(run: RunSettings, learner: LearnerSettings) -> bool:
    """Return whether the path is closed to others: on loopback, or in a trusted network."""
    return run.trusted_network or is_loopback(learner.publisher_endpoint)


def describe_weight_path(run: RunSettings, learner: LearnerSettings) -> str:
    """Describe in one line which path weights take, and why."""
    if uses_groups(run, learner):
        reason = "run.trusted_network is true"
        if is_loopback(learner.publisher_endpoint):
            reason = "the publisher listens on this machine alone"
        return f"over process groups, not encrypted: {reason}"
    reason = "learner.broadcast is false"
    if learner.broadcast is None and learner.advertise is not None:
        reason = f"actors reach the publisher as {learner.advertise}"
    elif learner.broadcast is None:
        reason = (
            f"learner.publisher_endpoint is {learner.publisher_endpoint} and "
            "run.trusted_network is false"
        )
    return f"pulled over CURVE: {reason}"


def is_loopback(endpoint: str) -> bool:
    """Return whether only this machine can reach an endpoint."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name or `*`
        return host == "localhost"
