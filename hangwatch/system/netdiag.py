"""Asks the kernel about sockets of local processes, which ``/proc`` says less of: ``SOCK_DIAG``.

``/proc/net/unix`` does not name the other end of a socket, nor how much waits in it. The same
table by netlink does (``unix_diag``), to anybody, for the network namespace that we live in.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

TIMEOUT: Final = 2.0
"""Seconds for each part of the answer; it comes at once."""

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST_DUMP: Final = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
# What to tell (include/uapi/linux/unix_diag.h): name, peer, queues, memory.
_SHOW: Final = 0x01 | 0x04 | 0x10 | 0x20
_NAME, _PEER, _QUEUES, _MEMORY = 0, 2, 4, 5
_LISTEN: Final = 10
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBHIIIII")
_ANSWER: Final = struct.Struct("=BBBBIII")
_ATTRIBUTE: Final = struct.Struct("=HH")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnixSocket:
    """A unix socket.

    Attributes:
        inode: It.
        peer: Inode of its other end; ``None`` where it has none.
        name: Path it is bound to, ``@…`` for an abstract one, or ``""``.
        listens: Whether it waits for callers; its queues are callers then, not bytes.
        unread: Bytes that came and were not read yet; a listener's callers that wait.
        unsent: Bytes that it sent and the other end has not read, as the kernel counts memory; a
            listener's most callers.
        room: Bytes of that memory that it may use, or ``None`` if not told.
    """

    inode: int
    peer: int | None = None
    name: str = ""
    listens: bool = False
    unread: int = 0
    unsent: int = 0
    room: int | None = None


def unix_sockets() -> dict[int, UnixSocket]:
    """Return the unix sockets of our network namespace by inode.

    Raises:
        OSError: The kernel does not answer such questions here.
    """
    body = _REQUEST.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW, 0, 0)
    head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0)
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    ) as asked:
        asked.settimeout(TIMEOUT)
        asked.send(head + body)
        return {found.inode: found for found in _answers(asked)}


def _answers(asked: socket.socket) -> Iterator[UnixSocket]:
    while True:
        data = asked.recv(1 << 18)
        position = 0
        while position + _HEADER.size <= len(data):
            length, kind, *_ = _HEADER.unpack_from(data, position)
            if kind == _NLMSG_DONE or length < _HEADER.size:
                return
            body = data[position + _HEADER.size : position + length]
            if kind == _NLMSG_ERROR:
                number = -struct.unpack_from("=i", body)[0]
                raise OSError(number, os.strerror(number))
            yield _unix(body)
            position += _aligned(length)


def _unix(body: bytes) -> UnixSocket:
    _, _, state, _, inode, _, _ = _ANSWER.unpack_from(body)
    peer, name, unread, unsent, room = None, "", 0, 0, None
    position = _ANSWER.size
    while position + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, position)
        if length < _ATTRIBUTE.size:
            break
        value = body[position + _ATTRIBUTE.size : position + length]
        if kind == _PEER:
            peer = struct.unpack_from("=I", value)[0] or None
        elif kind == _NAME:
            text = value.decode("utf-8", "surrogateescape")
            name = f"@{text[1:]}" if text.startswith("\0") else text.rstrip("\0")
        elif kind == _QUEUES:
            unread, unsent = struct.unpack_from("=II", value)
        elif kind == _MEMORY:
            room = struct.unpack_from("=4I", value)[3]  # SK_MEMINFO_SNDBUF
        position += _aligned(length)
    return UnixSocket(
        inode=inode,
        peer=peer,
        name=name,
        listens=state == _LISTEN,
        unread=unread,
        unsent=unsent,
        room=room,
    )


def _aligned(length: int) -> int:
    return (length + 3) & ~3
