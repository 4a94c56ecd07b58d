"""A member of a weight group in a process of its own, over gloo: killed, left, and used again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.weights.support import member_process as stories
from tests.weights.support.member_process import Group

pytestmark = pytest.mark.slow


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group("gloo", "cpu", 2**18, tmp_path)


def test_versions_arrive(group: Group) -> None:
    asyncio.run(stories.a_version_arrives(group, num_buckets=16))


def test_a_killed_member_costs_the_sender_its_deadline_at_most(group: Group) -> None:
    asyncio.run(stories.a_killed_member_costs_the_deadline(group, num_buckets=16))


def test_a_member_that_leaves_a_broadcast_is_in_the_next_group(group: Group) -> None:
    asyncio.run(stories.one_that_leaves_is_free_at_once(group, num_buckets=16))
