"""A server that moves while its name stays: run where /etc/hosts may be changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq

from broker.transport.keys import load_pair, load_public, make_client, make_keys
from broker.transport.sockets import bind_router, connect_dealer
from broker.transport.zap import ZapAuthenticator
from console.run.redis_server import free_port

HOSTS = Path("/etc/hosts")
NAME = "hub-that-moves.test"
PATIENCE_MS = 20_000


@contextmanager
def serving(keys: Path, address: str) -> Iterator[zmq.Socket[bytes]]:
    """Serve at this address until the block ends."""
    with zmq.Context() as context, ZapAuthenticator(context, keys):
        pair = load_pair(keys, "broker")
        socket = bind_router(context, address, keys=pair, max_message_bytes=4096)
        yield socket
        socket.close(0)


def main() -> None:
    """Reach a server by name, move both, and reach it again."""
    own, port = HOSTS.read_text(), free_port()
    with TemporaryDirectory() as place, zmq.Context() as context:
        keys = make_keys(Path(place) / "keys")
        make_client(keys, "actor-1")
        HOSTS.write_text(f"{own}127.0.0.1 {NAME}\n")
        dealer = connect_dealer(
            context,
            f"tcp://{NAME}:{port}",
            keys=load_pair(keys, "actor-1"),
            server_key=load_public(keys, "broker"),
            max_message_bytes=4096,
        )
        for host in ("127.0.0.1", "127.0.0.3"):
            HOSTS.write_text(f"{own}{host} {NAME}\n")
            with serving(keys, f"tcp://{host}:{port}") as server:
                assert dealer.poll(PATIENCE_MS, zmq.POLLOUT), f"not reached at {host}"
                dealer.send(host.encode(), zmq.NOBLOCK)
                assert server.recv_multipart()[1] == host.encode()
        dealer.close(0)


if __name__ == "__main__":
    main()
