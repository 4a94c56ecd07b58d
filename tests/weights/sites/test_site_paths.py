"""Sites as the publisher knows them: whom each actor asks, and which keys those may answer."""

import asyncio
import threading
from typing import Any

import pytest

from broker.protocol.manifest import chunk_digests
from broker.protocol.weight_messages import (
    CHUNK_BYTES,
    Announce,
    Join,
    Neighbours,
    PeerEndpoint,
    Pull,
)
from broker.weights.port import Route
from buffer.record.episode import PolicyVersion
from configs.errors import RecordError
from learner.weights.memory import WeightSlots
from learner.weights.server import WeightServer
from learner.weights.sites import FAN_OUT, PullTree, Sites
from learner.weights.updates import SparseChain
from tests.waiting import until
from tests.weights.support.scripted_publisher import contents, manifest


def peer(name: str) -> PeerEndpoint:
    return PeerEndpoint(f"tcp://{name}:1", f"key of {name}")


def joined(name: str, site: str = "", *, shares: bool = True) -> Join:
    return Join(
        PolicyVersion(-1, -1), False, "cpu", share=peer(name) if shares else None, site=site
    )


def grown(**sites: str) -> Sites:
    """Actors of these sites, each of which shares; `_` stands for none."""
    found = Sites()
    for name, site in sites.items():
        found.on_join(name, f"key of {name}", joined(name, "" if site == "_" else site))
    return found


@pytest.mark.parametrize("num_sharing", [1, 2, 3, 16, 100])
def test_one_actor_of_a_site_asks_the_publisher_and_every_way_ends_at_it(num_sharing):
    tree = PullTree(roots=1)
    names = [f"a{i}" for i in range(num_sharing)]
    for name in names:
        tree.on_join(name, peer(name))
    ways = {name: tree.way_of(name) for name in names}

    assert [name for name, way in ways.items() if not way] == ["a0"]
    nearest = [way[0] for way in ways.values() if way]
    assert all(nearest.count(each) <= FAN_OUT for each in nearest)
    for name, way in ways.items():
        assert peer(name) not in way
        assert len(set(way)) == len(way)
        assert not way or peer("a0") in way


def test_all_others_of_a_site_ask_its_second_actor_when_the_first_fails():
    tree = PullTree(roots=1)
    for name in ("first", "second", "third", "fourth", "fifth"):
        tree.on_join(name, peer(name))
    tree.on_join("taker", None)

    assert tree.way_of("second") == (peer("first"),)  # then the publisher
    assert tree.way_of("third") == (peer("first"), peer("second"))
    assert tree.way_of("fifth") == (peer("second"), peer("first"))
    for name in ("third", "fourth", "fifth", "taker", "not heard of yet"):
        assert {peer("first"), peer("second")} <= set(tree.way_of(name))


def test_actors_of_a_site_ask_only_each_other_and_those_of_none_are_as_before():
    sites = grown(a="eu", b="us", c="_", d="eu", e="us", f="_", g="_")

    assert sites.way_of("d") == (peer("a"),)
    assert sites.way_of("e") == (peer("b"),)
    assert sites.way_of("g") == (peer("c"),)
    assert [name for name in "abcdefg" if not sites.way_of(name)] == ["a", "b", "c", "f"]
    assert [name for name in "abcdefg" if sites.has(name)] == ["a", "b", "d", "e"]
    assert sites.sharing_with("d") == ["a", "d"]
    assert sites.sharing_with("c") == []


def test_the_second_actor_of_a_site_fetches_when_the_first_is_gone():
    sites = grown(a="eu", b="eu", c="eu")

    sites.forget_all_but({"b", "c"})

    assert sites.way_of("b") == ()
    assert sites.way_of("c") == (peer("b"),)


def test_those_that_share_may_answer_the_keys_of_their_site_alone():
    sites = grown(a="eu", b="us", c="_", d="eu")
    before = sites.neighbours_of("a")

    assert before == Neighbours(("key of a", "key of d"))
    assert sites.neighbours_of("d") is before  # nothing new to say
    sites.forget_all_but({"a", "b", "c"})
    assert sites.neighbours_of("a") == Neighbours(("key of a",))


def test_an_actor_stays_in_the_site_that_it_named_first():
    sites = grown(a="eu", b="us")

    sites.on_join("a", "key of a", joined("a", "us"))

    assert sites.neighbours_of("b") == Neighbours(("key of b",))


class Heard:
    """A server with one version, what it has posted to whom, and a clock that tests turn."""

    def __init__(self, folder, monkeypatch, chain: SparseChain | None = None) -> None:
        slots = WeightSlots(folder)
        slots.path(0).write_bytes(contents(1))
        slots.add(0)
        assert slots.acquire() == 0
        slots.seal(0, manifest(1))
        self.posted: list[tuple[str, object]] = []
        unused: Any = None
        self.server = WeightServer(
            unused, slots, run="toy", broadcast=None, chain=chain, report=lambda _sent: None
        )
        monkeypatch.setattr(self.server._port, "post", self._post)
        current = self.server._versions.advance()
        assert current is not None
        self.current = current

    def _post(self, route: Route, message: object) -> bool:
        self.posted.append((route.id.decode(), message))
        return True

    def join(self, name: str, site: str = "eu", **options) -> None:
        route, message = Route(name.encode()), joined(name, site, **options)
        self.server._on_message(route, f"key of {name}", name, message)

    def kinds(self) -> list[tuple[str, type]]:
        found = [(name, type(message)) for name, message in self.posted]
        self.posted.clear()
        return found


def test_who_is_new_in_a_site_has_the_news_when_its_peers_have_heard_of_it(tmp_path, monkeypatch):
    async def story():
        heard = Heard(tmp_path, monkeypatch)
        await heard.server._digests.make(heard.current)
        heard.join("first")
        found = [heard.kinds()]
        heard.join("second", shares=False)
        found.append(heard.kinds())
        heard.join("second", shares=False)
        found.append(heard.kinds())
        heard.join("first")  # nothing has changed
        found.append(heard.kinds())
        return found

    assert asyncio.run(story()) == [
        [("first", Neighbours), ("first", Announce)],
        [("first", Neighbours)],
        [("second", Announce)],
        [("first", Announce)],
    ]


def test_slices_of_a_version_that_nobody_shared_yet_have_digests_when_a_site_needs_them(
    tmp_path, monkeypatch
):
    async def story():
        heard = Heard(tmp_path, monkeypatch)
        making = asyncio.create_task(
            heard.server._digests.make_wanted(lambda: heard.server._versions.current)
        )
        heard.join("first")
        heard.join("second")
        heard.posted.clear()
        heard.join("second")
        found = [list(heard.posted)]
        await until(lambda: heard.server._digests.digests_of(PolicyVersion(1, 1)) is not None)
        heard.join("second")
        making.cancel()
        return found, heard.posted

    before, after = asyncio.run(story())
    assert before == [[]]
    ((name, news),) = after
    assert name == "second" and isinstance(news, Announce) and news.sources is not None
    assert news.sources.peers == (peer("first"),)
    assert news.sources.digests == chunk_digests(contents(1), CHUNK_BYTES)


def test_a_site_hears_within_two_joins_that_an_actor_is_gone(tmp_path, monkeypatch):
    async def story():
        heard = Heard(tmp_path, monkeypatch)
        now = [heard.server._clock()]
        heard.server._clock = lambda: now[0]
        heard.server._epochs._clock = lambda: now[0]
        for name in ("first", "second"):
            heard.join(name)
        heard.kinds()
        for _ in range(4):
            now[0] += 2.0
            heard.join("first")
        return [each for _, each in heard.posted if isinstance(each, Neighbours)]

    assert asyncio.run(story()) == [Neighbours(("key of first",))]


class SlowChain(SparseChain):
    """Makes an update for as long as a test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.may_end = threading.Event(), threading.Event()

    def advance(self, slot):
        self.began.set()
        self.may_end.wait(10.0)
        return super().advance(slot)


def test_an_actor_that_joins_while_updates_are_made_is_not_sent_after_all_bytes(
    tmp_path, monkeypatch
):
    async def story():
        chain = SlowChain()
        heard = Heard(tmp_path, monkeypatch, chain)
        announcing = asyncio.create_task(heard.server._announce(heard.current))
        await until(chain.began.is_set)
        heard.join("early", site="")
        before = heard.kinds()
        chain.may_end.set()
        await announcing
        return before, heard.kinds()

    assert asyncio.run(story()) == ([], [("early", Announce)])


def test_actors_of_the_wire_version_before_pull_beside_a_site(tmp_path, monkeypatch):
    async def story():
        heard = Heard(tmp_path, monkeypatch)
        heard.join("first")
        old = Join(PolicyVersion(-1, -1), False, "cpu")
        heard.server._on_message(Route(b"old", 4), "key of old", "old", old)
        heard.server._on_message(
            Route(b"old", 4), "key of old", "old", Pull(PolicyVersion(1, 1), 0, 4)
        )
        return [type(message).__name__ for name, message in heard.posted if name == "old"]

    assert asyncio.run(story()) == ["Announce", "WeightChunk"]


@pytest.mark.parametrize(
    ("endpoint", "key", "problem"),
    [
        ("tcp://first:1", "another key", "under the key of its connection"),
        ("garbage", "key of first", "share at tcp://host:port, got 'garbage'"),
        ("tcp://first:port", "key of first", "share at tcp://host:port"),
        (f"tcp://{'x' * 400}:1", "key of first", "share at tcp://host:port"),
    ],
)
def test_an_actor_that_shares_where_nobody_can_connect_is_not_named_to_others(
    tmp_path, monkeypatch, endpoint, key, problem
):
    async def story():
        heard = Heard(tmp_path, monkeypatch)
        join = Join(
            PolicyVersion(-1, -1), False, "cpu", share=PeerEndpoint(endpoint, key), site="eu"
        )
        with pytest.raises(RecordError, match=problem):
            heard.server._on_message(Route(b"x"), "key of first", "first", join)
        heard.join("second")
        return heard.posted

    (first, neighbours), (second, news) = asyncio.run(story())
    assert (first, second, type(news)) == ("second", "second", Announce)
    assert isinstance(neighbours, Neighbours)
    assert neighbours.keys == ("key of second",)
