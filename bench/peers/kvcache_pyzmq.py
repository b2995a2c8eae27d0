"""The KV-cache service over pyzmq.

What was chosen, by what the workers for single transfers have shown to be fast:
* A layer is copied into one piece and sent as one message (a message of as many parts as pages costs several times as
  much), and copied from the frame in which it came into its pages.
* Large messages are sent without one more copy, from a ring of buffers whose trackers tell when they are free again.
* Requests are answered in their order, so a layer needs no header.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from common import serve
from pyzmq_peer import COPIED_BELOW, Pyzmq

from kvcache import Request, Service, ServiceTask, ask, asked, pack

RING = 4


class KvPyzmq(Service, Pyzmq):
    """One DEALER socket a side."""

    def prepare(self, task: ServiceTask) -> None:
        self.pieces = np.empty((0 if self.decodes else RING, task.pages, task.size), np.uint8)

    def decode(self, task: ServiceTask) -> None:
        cache, tokens, socket, flying = self.cache, self.tokens(task), self.socket, deque[Request]()
        shape = task.pages, task.size
        while cache.left:
            while cache.more and len(flying) < task.window:
                request = cache.begin()
                flying.append(request)
                socket.send(ask(request, tokens))
            request, frame = flying[0], socket.recv(copy=False)
            cache.bytes[request.layers][request.pages] = np.frombuffer(frame.buffer, np.uint8).reshape(shape)
            if cache.arrived(request):
                cache.end(flying.popleft())

    def prefill(self, task: ServiceTask) -> None:
        cache, socket, pieces = self.cache, self.socket, self.pieces
        copy = task.layer_bytes < COPIED_BELOW
        trackers: list[Any] = [None] * RING
        for _ in range(task.count):
            number, _theirs = asked(socket.recv())
            for layer in range(task.layers):
                turn = layer % RING
                if trackers[turn]:
                    trackers[turn].wait()
                pack(cache, layer, number, pieces[turn])
                trackers[turn] = socket.send(pieces[turn], copy=copy, track=not copy)
        for tracker in filter(None, trackers):
            tracker.wait()


if __name__ == "__main__":
    serve(KvPyzmq)
