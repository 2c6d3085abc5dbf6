"""Messages between the launcher and the processes that fork for it. Standard library only."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections import deque
from typing import Any, Self

Message = dict[str, Any]


class Channel:
    """JSON messages, one a line, over a Unix socket; a message may carry a file descriptor."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._partial = b""
        self._messages: deque[Message] = deque()
        self._descriptors: deque[int] = deque()

    @classmethod
    def inherited(cls, descriptor: int) -> Self:
        """The end that this process was started with."""
        os.set_inheritable(descriptor, False)
        return cls(socket.socket(fileno=descriptor))

    @classmethod
    def with_far_end(cls) -> tuple[Self, socket.socket]:
        """A new channel, and the socket for the process at its other end."""
        near, far = socket.socketpair()
        return cls(near), far

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Write one message.

        Raises:
            EOFError: If nobody is at the other end.
        """
        line = json.dumps(message).encode() + b"\n"
        descriptors = [] if descriptor is None else [descriptor]
        try:
            sent = socket.send_fds(self._socket, [line], descriptors)
            self._socket.sendall(line[sent:])
        except OSError as error:
            raise EOFError("nobody is at the other end") from error

    def receive(self, timeout_s: float | None = 0.0) -> Message | None:
        """The next message, or None when time is up.

        Raises:
            EOFError: If there is none left and the other end is closed.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._messages:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if not wait_readable([self.fileno()], left_s):
                return None
            self._read()
        return self._messages.popleft()

    def take_descriptor(self) -> int:
        """The file descriptor that came with the oldest message that brought one."""
        return self._descriptors.popleft()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 65536, 4)
        except ConnectionError as error:
            raise EOFError("the other end broke off") from error
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            self._descriptors.append(descriptor)
        if not data:
            raise EOFError("the other end is closed")
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._messages.extend(json.loads(line) for line in lines)


def wait_readable(descriptors: list[int], timeout_s: float | None) -> bool:
    """Whether one of them has something to read (or is closed) before time is up."""
    # poll rather than select: a long-lived program may hold more than 1024 descriptors.
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    milliseconds = None if timeout_s is None else max(0, round(timeout_s * 1000))
    return bool(poll.poll(milliseconds))
