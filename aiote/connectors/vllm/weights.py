"""vLLM's `WeightTransferEngine`: weights from a trainer into the workers of vLLM, over aiote; see docs/connectors.md.

vLLM calls synchronously, in the worker's main thread. The trainer's rank 0 sends; its other ranks take part in the
collectives that gather the weights. Workers request each update from the trainer by a unique name, so a worker that
missed one update never takes the bytes of another.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ...bridge import Bridge
from ..buckets import slots_of
from ..host import HostCopy, Party, Receiving, Sending, Step, party

__all__ = [
    "AioteInitInfo",
    "AioteTrainerInitInfo",
    "AioteTrainerWeightTransferEngine",
    "AioteUpdateInfo",
    "AioteWeightTransferEngine",
]

BUCKET_SIZE = 64 << 20


@dataclass
class AioteInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The trainer's message to each worker: the trainer's address, and the bytes of a bucket."""

    trainer: str
    bucket_size: int = BUCKET_SIZE


@dataclass
class AioteUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The name of the update that a worker is to take."""

    update: str


@dataclass
class AioteTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The settings of a trainer's rank: the number of workers in all instances of vLLM, and the bytes of a bucket.

    An update fails unless exactly that many workers request it.
    """

    backend: ClassVar[str] = "aiote"

    workers: int = 1
    bucket_size: int = BUCKET_SIZE


class AioteWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The worker's side. A worker holds two buckets, and copies of the tensors that vLLM has not loaded yet."""

    init_info_cls = AioteInitInfo
    update_info_cls = AioteUpdateInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._init: AioteInitInfo | None = None

    def init_transfer_engine(self, init_info: AioteInitInfo) -> None:
        """Store the trainer's address, and open this process's engine. A later call may name another trainer."""
        self._init = init_info
        party()

    def start_weight_update(self) -> None:
        """Prepare vLLM to load layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Make vLLM process the layers that it has not processed yet."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: AioteUpdateInfo) -> None:
        """Receive an update and load it. Raises BroadcastError; each layer is then entirely the new or the old one.

        The trainer is told of an error that loading raises. Raises RuntimeError before `init_transfer_engine`.
        """
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        if self._init is None:
            raise RuntimeError("call init_transfer_engine before an update")
        bridge, (slots, bucket_bytes) = party().bridge, slots_of(self._init.bucket_size, 1)
        begin = Receiving.begin(party(), update_info.update, [self._init.trainer], slots, bucket_bytes)
        receiving, reason = bridge.call(begin), ""
        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(self._tensors(bridge, receiving))
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            self._put_back()
            raise
        finally:
            # Close here, not in the generator, because an error's traceback keeps the generator alive.
            bridge.call(receiving.close(reason))

    def _tensors(self, bridge: Bridge, receiving: Receiving) -> Iterator[tuple[str, torch.Tensor]]:
        while (bucket := bridge.call(receiving.next())) is not None:
            for copy, name, tensor in receiving.unpack(bucket):
                if copy is not None:
                    copy()
                if tensor is not None:
                    # vLLM keeps the tensor until its layer is complete, which may be after the bucket is used again.
                    yield name, tensor.to(self.device, copy=True)

    def _put_back(self) -> None:
        """Restore every incomplete layer; otherwise the next update would add to the part that has come."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Forget the trainer. The process's bridge stays for other users, and ends with the process."""
        self._init = None


class AioteTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's side, made by `trainer_init` on each of its ranks."""

    init_info_cls = AioteTrainerInitInfo

    def __init__(self, *, workers: int, bucket_size: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._workers, self._bucket_size = workers, bucket_size

    @classmethod
    def trainer_init(cls, init_info: AioteTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Make this rank's side; on the sender, tell the workers the trainer's address.

        Raises ValueError without a `source`.
        """
        if source is None:
            raise ValueError("the aiote backend sends all weights: expected a WeightSource")
        made = cls(
            client=client,
            source=source,
            is_sender=init_info.is_sender,
            workers=init_info.workers,
            bucket_size=init_info.bucket_size,
        )
        if made.is_sender:
            client.init_weight_transfer_engine(asdict(AioteInitInfo(party().address, init_info.bucket_size)))
        return made

    def send_weights(self) -> None:
        """Send the source's weights to every worker, and return when all have loaded them.

        Raises BroadcastError, or a worker's error; the next call begins a new update. The update fails if workers do
        not request it within `connect_timeout` of the first tensor; the error names the workers that have.
        """
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        mine, update = party(), secrets.token_hex(8)
        _, bucket_bytes = slots_of(self._bucket_size, 1)
        self.client.start_weight_update()
        sending = mine.bridge.call(Sending.begin(mine, update, bucket_bytes, self._workers))
        reason = ""
        # Do not wait for this thread at the end, because a stuck server would keep the error from the caller.
        caller = ThreadPoolExecutor(1, "aiote: update_weights")
        loading = caller.submit(self.client.update_weights, asdict(AioteUpdateInfo(update)))
        loading.add_done_callback(lambda done: give_up(mine, sending, done))
        try:
            for name, tensor in self.source:
                do(mine, sending.add(name, tensor))
            do(mine, sending.end())
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            mine.bridge.call(sending.close(reason))
            caller.shutdown(wait=False)
        loading.result()
        self.client.finish_weight_update()


def give_up(mine: Party, sending: Sending, done: Future[None]) -> None:
    """End an update that the workers have refused, because they would never request it."""
    if (error := done.exception()) is not None:
        mine.bridge.submit(sending.fail(f"update_weights: {error}"))


def do(mine: Party, steps: Iterator[Step]) -> None:
    """Run the steps of sending, one after the other."""
    for step in steps:
        if isinstance(step, HostCopy):
            step()
        else:
            mine.bridge.call(step)
