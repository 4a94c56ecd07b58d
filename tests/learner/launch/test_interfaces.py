"""Network interfaces of the ranks: what a person has set stays, and goes on to the publisher."""

from __future__ import annotations

import pytest

from learner.model.rendezvous import interfaces, without_launchers

PERSONS = {"NCCL_SOCKET_IFNAME": "ib0"}


def test_the_launcher_chooses_where_nobody_has() -> None:
    ranks = {"PATH": "/bin", **interfaces("lo", {"PATH": "/bin"})}

    assert ranks["GLOO_SOCKET_IFNAME"] == ranks["NCCL_SOCKET_IFNAME"] == "lo"
    assert without_launchers(ranks) == {"PATH": "/bin"}


def test_what_a_person_has_set_stays_for_ranks_and_publisher() -> None:
    ranks = {**PERSONS, **interfaces("lo", PERSONS)}

    assert ranks["NCCL_SOCKET_IFNAME"] == "ib0"
    assert ranks["GLOO_SOCKET_IFNAME"] == "lo"
    assert without_launchers(ranks) == PERSONS


@pytest.mark.parametrize("environment", [{}, PERSONS])
def test_a_rank_of_another_launcher_has_nothing_taken_away(environment: dict[str, str]) -> None:
    assert without_launchers(environment) == environment
