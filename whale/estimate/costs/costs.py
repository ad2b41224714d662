"""The figures that prices are made of, beside those of devices and links: said here once; who has measured better ones passes them."""

from __future__ import annotations

from dataclasses import dataclass

from whale.config import Config
from whale.ir.cluster import Device


@dataclass(frozen=True, slots=True)
class Costs:
    """What estimates assume.

    Attributes:
        launch_seconds: what one kernel costs beside its work, on the device itself.
        message_seconds: what starting one message or collective costs beside the latency of its link.
        backward_traffic: memory traffic of a backward pass relative to its forward pass: the gradient and the saved values
            are both read.
        optimizer_states: tensors that the optimizer keeps per parameter (Adam 2).
        fuses_pointwise: whether pointwise ops run in one kernel with the op that alone reads them, as with a compiler or kernels
            written by hand; they do not where ops run one by one.
        allows_tf32: whether float32 matrix products run in TensorFloat-32 where the device has it.
        bucket_bytes: gradients are synchronised in buckets of about this size.
        memory_fraction: share of each device's memory that a plan may use. The rest is the allowance for the driver's
            context, communicators and fragmentation.
    """

    launch_seconds: float = 4e-6
    message_seconds: float = 0.0
    backward_traffic: float = 2.0
    fuses_pointwise: bool = False
    allows_tf32: bool = False
    optimizer_states: int = 2
    bucket_bytes: int = 25 * 2**20
    memory_fraction: float = 0.9

    @staticmethod
    def of(config: Config) -> Costs:
        """The starting values with what the user has set."""
        return Costs(
            optimizer_states=config.memory.optimizer_states,
            bucket_bytes=config.communication.bucket_bytes,
            memory_fraction=config.memory.fraction,
        )

    def capacity(self, device: Device) -> int:
        """Bytes that a plan may use on a device."""
        return int(device.memory * self.memory_fraction)
