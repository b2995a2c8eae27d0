"""The KV-cache service through NIXL's Python API.

What was chosen, by what the workers for single transfers have shown to be fast:
* One descriptor for each page of each layer on both sides, prepared once (`prep_xfer_dlist`); a layer is one transfer
  made of them (`make_prepped_xfer`), with a notification that the decode side polls for. It names the request's slot.
* The layers of a request are posted at once, and several requests are under way; a transfer is released when done.
* The request, tokens included, is a notification.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from common import Arena, Options, serve
from nixl_peer import Nixl

from kvcache import Request, Service, ServiceTask, ask, asked


class KvNixl(Service, Nixl):
    """One agent a side; the prefill side writes."""

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        self.flying: deque[Any] = deque()

    def refusal(self, task: ServiceTask) -> str:
        return Service.refusal(self, task)

    def prepare(self, task: ServiceTask) -> None:
        self._release()
        if self.decodes:
            return
        pieces = task.layers * task.pool
        self.lists = [
            self.agent.prep_xfer_dlist(name, [(base + i * task.size, task.size, 0) for i in range(pieces)], "DRAM")
            for name, base in (("NIXL_INIT_AGENT", self.arena.address), (self.peer, self.peer_arena))
        ]

    def decode(self, task: ServiceTask) -> None:
        cache, tokens, flying = self.cache, self.tokens(task), dict[int, Request]()
        while cache.left:
            while cache.more and len(flying) < task.window:
                request = cache.begin()
                flying[request.number] = request
                self.agent.send_notif(self.peer, ask(request, tokens))
            note = self._next()
            request = flying[int.from_bytes(note, "little")]
            if cache.arrived(request):
                cache.end(flying.pop(request.number))

    def prefill(self, task: ServiceTask) -> None:
        left = task.count
        while left or self.flying:
            self._poll()
            while self.notifications:
                self._post(task, self.notifications.pop(0))
                left -= 1
            while self.flying:
                state = self.agent.check_xfer_state(self.flying[0])
                if state == "ERR":
                    raise OSError("NIXL reports a failed transfer")
                if state != "DONE":
                    break
                self.agent.release_xfer_handle(self.flying.popleft())

    def _post(self, task: ServiceTask, message: bytes) -> None:
        agent, (ours, theirs) = self.agent, self.lists
        number, pages = asked(message)
        note = number.to_bytes(4, "little")
        source, target = self.cache.ours(number), pages.astype(int)
        for layer in range(task.layers):
            first = layer * task.pool
            handle = agent.make_prepped_xfer("WRITE", ours, source + first, theirs, target + first, note)
            if agent.transfer(handle) == "ERR":
                raise OSError("NIXL refused a transfer")
            self.flying.append(handle)


if __name__ == "__main__":
    serve(KvNixl)
