"""What the ranks of a group tell each other beside it, so that they can also tell that the group hangs."""

from __future__ import annotations

import json
import os
import socket
from multiprocessing.connection import Client, Connection, Listener
from typing import TypeVar

from gradscale.core import registry
from gradscale.errors import CollectiveTimeoutError
from gradscale.waiting import call_within

_Message = TypeVar("_Message")

# Bytes of an address, and seconds that a message may take besides the time after which a rank gives up by itself.
_LONGEST_ADDRESS, _MARGIN = 400, 10.0


class SideChannel:
    """Connections of all ranks to rank 0; none for a process alone, without a group."""

    def __init__(self, group: object, timeout: float) -> None:
        self.rank, self.size, self._patience = 0, 1, timeout + _MARGIN
        self._connections: list[Connection] = []
        if group is None:
            return
        collectives = registry.collectives_for(group, timeout)
        self.rank, self.size, key = collectives.rank, collectives.size, os.urandom(16)
        like = (getattr(collectives, "example", None) or registry.array_backend("numpy").example)()
        listener = None if self.rank else Listener(("", 0), backlog=self.size, authkey=key)
        # The address alone goes over the group, as bytes of which the other ranks have zeros.
        text = json.dumps([socket.gethostname(), listener.address[1], key.hex()]) if listener else ""
        backend = registry.backend_for(like)
        sent = backend.integers([*text.encode().ljust(_LONGEST_ADDRESS, b"\0")], like)
        received = bytes(backend.read(collectives.start_max(sent)())).rstrip(b"\0")
        if listener is None:
            host, port, key_text = json.loads(received)
            address = "localhost" if host == socket.gethostname() else host, port
            self._connections = [Client(address, authkey=bytes.fromhex(key_text))]
        else:
            self._connections = [call_within(listener.accept, timeout) for _ in range(1, self.size)]
            listener.close()

    def exchange(self, message: _Message) -> list[_Message]:
        """Return the messages of all ranks, by rank; CollectiveTimeoutError if one does not answer."""
        messages = {self.rank: message}
        for connection in self._connections:
            if self.rank:
                connection.send(messages)
            # Rank 0 may itself wait for the others.
            if not connection.poll(self._patience * (1.0 + (self.rank > 0))):
                raise CollectiveTimeoutError(self.rank, self.size, self._patience, operation="check_trainer")
            messages |= connection.recv()
        for connection in self._connections:
            if self.rank == 0:
                connection.send(messages)
        return [messages[rank] for rank in range(self.size)]
