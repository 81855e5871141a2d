"""Two hosts on one network with this machine, as network namespaces."""

from __future__ import annotations

import os
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Network(NamedTuple):
    """Names of the hosts, each with an interface `veth`; the address of the first of them, and of
    this machine as they see it.
    """

    hosts: tuple[str, str]
    first: str
    here: str


@contextmanager
def network() -> Iterator[Network | None]:
    """Yields two hosts, or None where they cannot be made."""
    number = os.getpid()
    bridge, subnet, hosts = (
        f"ckbr{number}",
        f"10.77.{number % 250}",
        (f"ckpt-{number}-a", f"ckpt-{number}-b"),
    )
    setup = [
        f"link add {bridge} type bridge",
        f"addr add {subnet}.254/24 dev {bridge}",
        f"link set {bridge} up",
    ]
    for at, name in enumerate(hosts, 1):
        setup += [
            f"netns add {name}",
            f"link add ckv{at}{number} type veth peer name veth netns {name}",
            f"link set ckv{at}{number} master {bridge} up",
            f"-n {name} addr add {subnet}.{at}/24 dev veth",
            f"-n {name} link set veth up",
            f"-n {name} link set lo up",
        ]
    try:
        can = bool(shutil.which("ip")) and all(
            subprocess.run(["ip", *line.split()], capture_output=True).returncode == 0
            for line in setup
        )
        yield Network(hosts, f"{subnet}.1", f"{subnet}.254") if can else None
    finally:
        for words in (
            (*(["netns", "del", name] for name in hosts), ["link", "del", bridge])
            if shutil.which("ip")
            else ()
        ):
            subprocess.run(["ip", *words], capture_output=True)


def two_by_two(
    net: Network, *words: object, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Starts `ckpt` as two processes on each host."""
    jobs = []
    for number, name in enumerate(net.hosts):
        launch = [
            "--nnodes",
            2,
            "--nproc-per-node",
            2,
            "--node-rank",
            number,
            "--master-addr",
            net.first,
            "--master-port",
            29555,
        ]
        command = [
            "ip",
            "netns",
            "exec",
            name,
            sys.executable,
            "-m",
            "torch.distributed.run",
            *launch,
            "-m",
            "ckpt_tools",
            *words,
        ]
        own = os.environ | {"GLOO_SOCKET_IFNAME": "veth"} | dict(environment or {})
        jobs.append(
            subprocess.Popen(
                list(map(str, command)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=own,
                cwd=ROOT,
            )
        )
    return jobs


def ended(jobs: Sequence[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Waits for jobs, all of which must succeed; returns what each wrote."""
    outputs = [job.communicate(timeout=180) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), outputs
    return outputs


class _Relay(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with socket.create_connection(self.server.target) as there:  # type: ignore[attr-defined]
            back = threading.Thread(target=_pour, args=(there, self.request))
            back.start()
            _pour(self.request, there)
            back.join()


def _pour(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 18):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, allow_reuse_address = True, True
    target: Any = None


@contextmanager
def reachable(net: Network, port: int) -> Iterator[str]:
    """Yields the URL under which the hosts reach a server that listens on this machine's
    loopback.
    """
    with _Server((net.here, 0), _Relay) as server:
        server.target = ("127.0.0.1", port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{net.here}:{server.server_address[1]}"
        finally:
            server.shutdown()
