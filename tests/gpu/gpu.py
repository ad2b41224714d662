"""The device of the GPU tier: the GPU of this process where it has one, else the stand-in (`tests.standin`)."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.distributed.ranks import Job, Outcome, outcome_of_rank
from tests.distributed.world import World
from tests.standin import DEVICE, OnDevice, StandIn
from whale.capture import capture

needs_memory = pytest.mark.skipif(not torch.cuda.is_available(), reason="the stand-in device does not count the bytes of its tensors")

needs_streams = pytest.mark.skipif(not torch.cuda.is_available(), reason="the stand-in device has no streams")


@dataclass(frozen=True)
class Gpu:
    """Where whale computes.

    Attributes:
        device: as torch names it.
        stand_in: what looks at the ops; None on a GPU.
    """

    device: torch.device
    stand_in: StandIn | None

    @contextmanager
    def never_waits(self) -> Iterator[None]:
        """Fails where the host waits for the device inside."""
        if self.stand_in is not None:
            self.stand_in.forget()
            yield
            assert self.stand_in.waits == []
            return
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def on_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The numbers of tensors that all lie on the device."""
        assert all(value.device.type == self.device.type for value in tensors.values())
        return {name: value.held if isinstance(value, OnDevice) else value.cpu() for name, value in tensors.items()}


def _capture(capture: Callable[..., Any], *arguments: Any, device: str, **options: Any) -> Any:
    """Under the CPU's autocast, for torch has none for the stand-in device."""
    return capture(*arguments, device="cpu" if device == DEVICE.type else device, **options)


@contextmanager
def gpu_or_stand_in() -> Iterator[Gpu]:
    """While it is open, whale computes on the GPU, or on the stand-in device."""
    if torch.cuda.is_available():
        yield Gpu(torch.device("cuda"), None)
        return
    patches = (
        mock.patch("whale.comm.world._device", return_value=DEVICE),
        mock.patch("whale.api.mode.capture", partial(_capture, capture)),
        mock.patch("torch.optim.optimizer._get_fused_kernels_supported_devices", return_value=["cpu", DEVICE.type]),
    )
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield Gpu(DEVICE, stack.enter_context(StandIn()))


class GpuRanks(World):
    """Ranks that live from run to run: a process that is forked from one with torch in it cannot use the GPU."""

    _pool: ProcessPoolExecutor | None = None

    def _outcomes(self, job: Job) -> list[Outcome]:
        if job.num_ranks == 0:
            return [Outcome(job.function(*job.arguments))]
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.num_ranks, multiprocessing.get_context("spawn"))
        try:
            return [
                each.result(job.timeout) for each in [self._pool.submit(outcome_of_rank, number, job) for number in range(job.num_ranks)]
            ]
        except Exception:
            self._stop()
            raise

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def ranks_on_gpu(num_ranks: int) -> World:
    """Ranks that share the GPU, or the stand-in device of each."""
    return GpuRanks(num_ranks, timeout=180.0) if torch.cuda.is_available() else World(num_ranks, timeout=180.0)
