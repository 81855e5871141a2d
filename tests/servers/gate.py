"""A door before a server: while it is shut, connections are refused, and those that were open are
reset.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from tests.servers.servers import Server, free_port


class Gate:
    """Passes on bytes between a port of its own and a server, as long as it is open."""

    def __init__(self, port: int) -> None:
        self.target, self.port = port, free_port()
        self._sockets: set[socket.socket] = set()
        self._held, self.holding, self._go_on = b"", threading.Event(), threading.Event()
        self._listener: socket.socket | None = None
        self.open()

    def open(self) -> None:
        """Lets connections through."""
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def shut(self) -> None:
        """Ends all connections, and refuses new ones."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for one in list(self._sockets):
            with suppress(OSError):
                # a reset, not a goodbye
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets.clear()

    def hold(self, what: bytes) -> None:
        """Keeps back what contains these bytes, and what follows it on its connection; `holding`
        tells when that has come.
        """
        self._held = what

    def let_go(self) -> None:
        """Passes on what was kept back."""
        self._held = b""
        self._go_on.set()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                here, _ = listener.accept()
                there = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return
            self._sockets |= {here, there}
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._held and self._held in data:
                    self.holding.set()
                    self._go_on.wait()
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
            self._sockets.discard(one)


@contextmanager
def gated(server: Server) -> Iterator[tuple[Server, Gate]]:
    """Yields a server as it is reached through a gate, and the gate."""
    gate = Gate(int(server.endpoint.rpartition(":")[2]))
    try:
        yield replace(server, endpoint=f"http://127.0.0.1:{gate.port}"), gate
    finally:
        gate.shut()
