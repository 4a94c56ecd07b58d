"""More Redis servers than the session's one: with sentinels, in cluster mode, and behind TLS."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import redis

from console.run.redis_server import free_port
from tests.conftest import find_redis_server
from tests.waiting import wait_until

PASSWORD = "hunter2"


@contextmanager
def server(
    folder: Path, settings: str, *arguments: str, port: int | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a server of its own, at a free port if none is given; yields its process and port."""
    port = port or free_port()
    folder.mkdir(parents=True)
    file = folder / "redis.conf"
    file.write_text(f'bind 127.0.0.1\nport {port}\ndir "{folder}"\n{settings}')
    with (folder / "log").open("wb") as log:
        command = [find_redis_server(), str(file), *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()


@contextmanager
def watched_pair(
    folder: Path, *, num_sentinels: int = 1, more: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], int, str]]:
    """A primary, its replica and sentinels; yields the primary, its port and the URL.

    Args:
        folder: Of all of them.
        num_sentinels: Of whom more than half must agree that the primary is gone.
        more: Settings of primary and replica.
    """
    password = f"requirepass {PASSWORD}\nmasterauth {PASSWORD}\n"
    plain = f'save ""\n{more}{password}repl-diskless-sync-delay 0\n'
    with ExitStack() as stack:
        primary, port = stack.enter_context(server(folder / "primary", plain))
        follow = f"replicaof 127.0.0.1 {port}\nrepl-diskless-load swapdb\n"
        _, replica = stack.enter_context(server(folder / "replica", plain + follow))
        with redis.Redis(port=replica, password=PASSWORD) as client:
            wait_until(
                lambda: client.info("replication")["master_link_status"] == "up",
                ignoring=redis.RedisError,
            )
        watch = (
            f"sentinel monitor nyala 127.0.0.1 {port} {num_sentinels // 2 + 1}\n"
            f"sentinel auth-pass nyala {PASSWORD}\n"
            "sentinel down-after-milliseconds nyala 500\n"
            "sentinel failover-timeout nyala 5000\n"
        )
        ports = [free_port()]  # nobody listens there: the first sentinel of the URL is away
        for number in range(num_sentinels):
            place = folder / f"sentinel-{number}"
            _, sentinel = stack.enter_context(server(place, watch, "--sentinel"))
            ports.append(sentinel)
        for sentinel in ports[1:]:
            with redis.Redis(port=sentinel) as client:
                wait_until(lambda: _knows_all(client, num_sentinels), ignoring=redis.RedisError)
        sentinels = ",".join(f"127.0.0.1:{each}" for each in ports)
        yield primary, port, f"redis+sentinel://:{PASSWORD}@{sentinels}/nyala/0"


@contextmanager
def server_in_cluster_mode(folder: Path) -> Iterator[str]:
    """A node of Redis Cluster; yields its URL."""
    bus = f"cluster-port {free_port()}\n"  # else 10,000 above the port, where there may be none
    with server(folder, f"cluster-enabled yes\n{bus}") as (_, port):
        with redis.Redis(port=port) as client:
            wait_until(client.ping, ignoring=redis.RedisError)
        yield f"redis://127.0.0.1:{port}/0"


def _knows_all(sentinel: redis.Redis, num_sentinels: int) -> bool:
    """Whether it knows the replica, and the other sentinels."""
    others = sentinel.execute_command("SENTINEL", "SENTINELS", "nyala")
    return len(sentinel.sentinel_slaves("nyala")) == 1 and len(others) == num_sentinels - 1


@contextmanager
def tls_front(folder: Path, port: int) -> Iterator[tuple[int, Path]]:
    """TLS before a server that has none; yields its port and the certificate to trust."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=_serve, args=(listener, context, port), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], certificate
    finally:
        listener.close()
        thread.join(10)


def _serve(listener: socket.socket, context: ssl.SSLContext, port: int) -> None:
    listener.settimeout(0.1)
    while listener.fileno() != -1:
        try:
            raw, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        with suppress(OSError), context.wrap_socket(raw, server_side=True) as client:
            _pass_on(client, port)


def _pass_on(client: ssl.SSLSocket, port: int) -> None:
    """Serve one client, whose requests and replies take turns."""
    with socket.create_connection(("127.0.0.1", port)) as server_side:
        client.settimeout(0.01)
        server_side.settimeout(0.01)
        while True:
            for source, sink in ((client, server_side), (server_side, client)):
                with suppress(TimeoutError):
                    if not (part := source.recv(65536)):
                        return
                    sink.sendall(part)
