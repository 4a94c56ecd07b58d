"""A member of a group that is sent updates, or an adapter behind its base.

Why a fake group suffices here: real ones are in test_group_form.py, but their members have pulled
the base long before the first group forms.
"""

import asyncio
import mmap
from collections.abc import Iterator

import pytest
from msgspec import structs

from actors.weights.counters import WeightCounters
from actors.weights.group import GroupMember
from actors.weights.held import HeldWeights
from actors.weights.staging_files import StagingFiles
from actors.weights.updates import WeightUpdates
from broker.protocol.manifest import BASE, SparseLink, digest_of
from broker.protocol.weight_messages import Ack, Announce, Epoch, Ready, Send, WeightGroupFault
from broker.weights.sparse import elements, encode_changes
from buffer.record.episode import PolicyVersion
from learner.weights.gather import adapted_weights, gather_adapter
from learner.weights.layout import layout
from tests.learner.support.adapted_policy import published_bytes
from tests.weights.support.adapted_toy import AdaptedToy
from tests.weights.support.scripted_publisher import contents, manifest


class Member:
    """A member, the place in which it joins groups, and what these send."""

    is_open = True

    def __init__(self, folder) -> None:
        self.posted: list[object] = []
        self.held = HeldWeights()
        self.counters = WeightCounters()
        self.updates = WeightUpdates(self.held, self.counters)
        self._sent = b""
        self._files = StagingFiles("test", fallback=folder)
        self._member = GroupMember(
            self._post, self.updates, self._files, self.counters, place=self, timeout_s=5.0
        )

    def _post(self, message: object) -> bool:
        self.posted.append(message)
        return True

    async def run(self) -> None:
        pass

    async def enter(self, epoch) -> None:
        pass

    async def receive(self, path, memory) -> str:
        assert path.stat().st_size == len(memory)
        memory[:] = self._sent
        return digest_of([memory])

    def leave_group(self) -> None:
        pass

    def hold(self, whole: bytes, step: int = 0) -> None:
        memory = mmap.mmap(-1, len(whole))
        memory[:] = whole
        self.held.hold(PolicyVersion(1, step), memory)

    def take(self, version, sent: bytes, links=(), *, has_base=False) -> bytes | None:
        """Send it a version in this form; returns what it has made of it, if it confirms that."""
        self._sent, file = sent, self._files.acquire(version.num_bytes)
        epoch = Epoch(1, version.version, True, "gloo", "127.0.0.1", 1, 1, 2, 2**20, 1.0, 1.0)

        async def story() -> bool:
            self._member.expect(version.version)
            self._member.on_message(epoch)
            self._member.on_message(Send(1, version.version, links, has_base))
            return await self._member.fetch(Announce(version, 1), file)

        is_here = asyncio.run(story())
        assert isinstance(self.posted[-1], Ack if is_here else WeightGroupFault)
        assert self._files._folder is not None
        there = list(self._files._folder.path.glob("weights-*"))
        assert there == [file.path], "that of an update has gone"
        found = file.memory[:]
        self._files.release(file)
        return found if is_here else None

    @property
    def ready(self) -> Ready:
        (found,) = [message for message in self.posted if isinstance(message, Ready)]
        return found


@pytest.fixture
def member(tmp_path) -> Iterator[Member]:
    member = Member(tmp_path)
    yield member
    member._files.close()


def update(base: int, step: int) -> tuple[SparseLink, bytes]:
    """What has changed since a version."""
    payload, _ = encode_changes(*(elements(contents(each), "bfloat16") for each in (base, step)))
    assert payload is not None
    return SparseLink(PolicyVersion(1, base), PolicyVersion(1, step), len(payload)), payload


@pytest.mark.parametrize("begins", [1, 2])
def test_a_member_applies_the_updates_since_its_own_version(member, begins):
    links, payloads = zip(*(update(step, step + 1) for step in (1, 2)), strict=True)
    member.hold(contents(begins), begins)

    assert member.take(manifest(3), b"".join(payloads), links) == contents(3)
    assert member.ready.held == (1, begins)
    assert member.counters.group_bytes == sum(map(len, payloads))


def test_a_member_says_what_it_has(member):
    assert member.take(manifest(3), contents(3)) == contents(3)
    assert (member.ready.held, member.ready.base) == (None, "")


@pytest.mark.parametrize("wrong", ["base", "payload", "nothing held"])
def test_a_member_that_an_update_leads_astray_faults_and_no_longer_offers_its_version(
    member, wrong
):
    link, payload = update(1, 3)
    if wrong != "nothing held":
        spoilt = bytearray(contents(1))
        spoilt[0] ^= wrong == "base"
        member.hold(bytes(spoilt), 1)
    damaged = payload[:-1] if wrong == "payload" else payload
    link = structs.replace(link, num_bytes=len(damaged))

    assert member.take(manifest(3), damaged, (link,)) is None
    assert member.updates.held is None


def test_updates_to_weights_of_another_size_are_a_fault_and_harm_nothing(member):
    link, payload = update(1, 3)
    member.hold(contents(1)[:-2], 1)

    assert member.take(manifest(3), payload, (link,)) is None
    assert member.updates.held == (1, 1)


def adapted(step: int):
    """A version of the toy model, its adapter and the base of that."""
    model = AdaptedToy()
    base = published_bytes(model, is_merged=False)
    model.step(step)
    spec, adapter = gather_adapter(model, digest_of([base]), adapted_weights(model))
    whole = published_bytes(model)
    version = structs.replace(
        manifest(step),
        digest=digest_of([whole]),
        num_bytes=len(whole),
        tensors=layout(model, "float32"),
        adapter=spec,
    )
    return version, SparseLink(BASE, version.version, len(adapter)), adapter, base, whole


def test_a_member_keeps_the_base_that_comes_before_an_adapter(member):
    version, link, adapter, base, whole = adapted(1)
    assert member.take(version, base + adapter, (link,), has_base=True) == whole
    assert member.updates.base == version.adapter.base

    version, link, adapter, _, whole = adapted(2)
    assert member.take(version, adapter, (link,)) == whole
    assert member.take(version, bytes(len(base)) + adapter, (link,), has_base=True) == whole


@pytest.mark.parametrize("harm", ["base", "adapter"])
def test_a_member_whose_base_or_adapter_is_wrong_faults(member, harm):
    version, link, adapter, base, _ = adapted(1)
    if harm == "base":
        base = bytes(len(base))
    else:
        adapter = bytes(len(adapter))

    assert member.take(version, base + adapter, (link,), has_base=True) is None
    assert member.updates.base == ""
    assert member.counters.digest_mismatches == 1
