"""Listeners of gloo: the members have met, and nobody else connects any more."""

from __future__ import annotations

import socket

import pytest

from broker.weights.group_thread import DESCRIPTORS, closed_to_strangers

REFUSED_S = 0.5


def test_who_comes_after_the_members_have_met_is_not_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as of_others:
        of_others.set_inheritable(True)
        with closed_to_strangers():
            listener = socket.create_server(("127.0.0.1", 0))
            listener.set_inheritable(True)  # as gloo's
            one_of_ours = socket.create_server(("127.0.0.1", 0))
            peer = socket.create_connection(listener.getsockname(), timeout=5)
            ours, _ = listener.accept()

        for _ in range(3):
            with pytest.raises(TimeoutError):
                socket.create_connection(listener.getsockname(), timeout=REFUSED_S)
        for open_to_all in (of_others, one_of_ours):
            socket.create_connection(open_to_all.getsockname(), timeout=5).close()
        peer.sendall(b"still there")
        assert ours.recv(64) == b"still there"
        for each in (peer, ours, listener, one_of_ours):
            each.close()


def test_a_look_at_the_descriptors_leaves_none_open() -> None:
    before = len(list(DESCRIPTORS.iterdir()))

    with closed_to_strangers():
        pass

    assert len(list(DESCRIPTORS.iterdir())) == before
