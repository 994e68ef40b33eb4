"""How the processes of a run talk: whole Python objects over a stream socket, without ever blocking the sender."""

import contextlib
import os
import pickle
import socket
import struct
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

__all__ = ["HEADER", "Link", "accept", "connect", "listen", "pack"]

HEADER = struct.Struct("!Q")
_CHUNK = 1 << 18
_TURN = 1 << 22


def pack(message: Any) -> bytes:
    """The bytes of one message: its length, then its pickle."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data


class Link:
    """One end of a connection, for a loop that serves several.

    What the other side doesn't take at once is kept and sent by `flush`, so a slow reader stops nobody.

    Args:
        sock: Connected; made non-blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._in = bytearray()
        self._out = bytearray()
        self.closed = False  # the other side is gone

    def fileno(self) -> int:
        """For selectors; -1 once closed here."""
        return self._sock.fileno()

    @property
    def pending(self) -> bool:
        """True while there is something left to `flush`."""
        return bool(self._out) and not self.closed

    def send(self, message: Any) -> None:
        """Queues a message and sends as much as goes without waiting."""
        if not self.closed:
            self._out += pack(message)
            self.flush()

    def flush(self) -> None:
        """Sends what goes without waiting."""
        try:
            while self._out:
                sent = self._sock.send(memoryview(self._out)[:_CHUNK])
                del self._out[:sent]
        except BlockingIOError:
            return
        except OSError:
            # What the other side sent before it went is still to be read: only an end of input closes the link.
            self._out.clear()

    def receive(self, limit: int | None = _TURN) -> list[Any]:
        """The whole messages that have arrived. Sets ``closed`` at the end of input.

        Args:
            limit: Reads at most about so many bytes, so that one who talks all the time silences nobody; None: all.
        """
        read = 0
        try:
            while not self.closed and (limit is None or read < limit):
                data = self._sock.recv(_CHUNK)
                self.closed = not data
                self._in += data
                read += len(data)
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        messages, start = [], 0
        while len(self._in) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._in, start)
            end = start + HEADER.size + length
            if len(self._in) < end:
                break
            messages.append(pickle.loads(memoryview(self._in)[start + HEADER.size : end]))
            start = end
        del self._in[:start]
        return messages

    def close(self) -> None:
        """Closes this end."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._sock.close()


def listen(address: str | tuple[str, int]) -> socket.socket:
    """A listening socket: a path for this machine only, ``(host, port)`` for others."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.bind(address)
    server.listen(128)
    return server


def accept(server: socket.socket, authkey: bytes, timeout: float) -> Link:
    """Waits for one agent, and for its proof that it knows the key.

    Raises:
        TimeoutError: None came in ``timeout`` seconds.
        multiprocessing.AuthenticationError: It doesn't know the key.
    """
    server.settimeout(timeout)
    sock, _ = server.accept()
    sock.setblocking(True)
    connection = Connection(os.dup(sock.fileno()))
    try:
        deliver_challenge(connection, authkey)
        answer_challenge(connection, authkey)
    except BaseException:
        sock.close()
        raise
    finally:
        connection.close()
    return Link(_tuned(sock))


def connect(address: str | tuple[str, int], authkey: bytes) -> Link:
    """The agent's side of `accept`."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with Client(address, authkey=authkey) as connection:
        return Link(_tuned(socket.socket(family, socket.SOCK_STREAM, fileno=os.dup(connection.fileno()))))


def _tuned(sock: socket.socket) -> socket.socket:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock
