"""Listeners of gloo: the ranks have met, and nobody else connects any more."""

from __future__ import annotations

import socket

import pytest

from learner.model.rendezvous import DESCRIPTORS, closed_to_strangers

REFUSED_S = 0.5


def test_who_comes_after_the_ranks_have_met_is_not_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as of_others:
        with closed_to_strangers():
            listener = socket.create_server(("127.0.0.1", 0))
            peer = socket.create_connection(listener.getsockname(), timeout=5)
            ours, _ = listener.accept()

        for _ in range(3):
            with pytest.raises(TimeoutError):
                socket.create_connection(listener.getsockname(), timeout=REFUSED_S)
        socket.create_connection(of_others.getsockname(), timeout=5).close()
        peer.sendall(b"still there")
        assert ours.recv(64) == b"still there"
        for each in (peer, ours, listener):
            each.close()


def test_the_store_of_another_launcher_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with closed_to_strangers():
        store = socket.create_server(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(store.getsockname()[1]))

    socket.create_connection(store.getsockname(), timeout=5).close()
    store.close()


def test_a_look_at_the_descriptors_leaves_none_open() -> None:
    before = len(list(DESCRIPTORS.iterdir()))

    with closed_to_strangers():
        pass

    assert len(list(DESCRIPTORS.iterdir())) == before
