"""The figures that prices are made of, beside those of devices and links: said here once; who has measured better ones passes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from whale.config import Config
from whale.config.keys import Choice
from whale.errors import ConfigError, first_few
from whale.estimate.costs.measured import Measured, measured
from whale.hardware.precision import HALVES
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import ModelGraph
from whale.ir.patterns import idle_patterns
from whale.ir.plan import Zero
from whale.ir.profile import read_profile

_ON_HOST = {"optimizer": ("optimizer",), "optimizer+parameters": ("optimizer", "compute")}


@dataclass(frozen=True, slots=True)
class Costs:
    """What estimates assume.

    Attributes:
        launch_seconds: what one kernel costs beside its work, on the device itself.
        message_seconds: what starting one message or collective costs beside the latency of its link; inside a split group it takes
            as long of the host, which runs ahead.
        waiting_seconds: what an op whose weight gradients wait costs the host in each of its passes, forward, I and W, beside starting
            its kernels, where that was not measured: Python runs it (26 us for all three on a current CPU core; of GPUs nothing is known).
        backward_traffic: memory traffic of a backward pass relative to its forward pass: the gradient and the saved values
            are both read.
        optimizer_states: tensors that the optimizer keeps per parameter (Adam 2).
        fuses_pointwise: whether pointwise ops run in one kernel with the op that alone reads them, as with a compiler or kernels
            written by hand; they do not where ops run one by one.
        allows_tf32: whether float32 matrix products run in TensorFloat-32 where the device has it.
        zero: stage of ZeRO, of all parameters or by patterns of their names: from 1 on the optimizer form is shared out among the
            owners, from 2 on the gradient form too, at 3 what ops read.
        offload: ``optimizer`` where the optimizer form of parameters lives on the host, ``optimizer+parameters`` where what ops read
            does too, ``activations`` where what is kept for backward passes does.
        brings_back: whether as much of that is back on devices as fits.
        host_bandwidth: bytes per second of the memory of a host, which its devices share; a starting value, 40 % of eight channels of
            DDR4-3200.
        gradient_dtype: type in which gradients are accumulated; None for that of the parameter.
        sum_dtype: type in which gradients are summed; None for their own.
        feeds_back: whether what rounding to it loses is kept, and added to the next gradient.
        bucket_bytes: gradients are synchronised in buckets of about this size.
        defers_weights: whether weights that others keep are on their way during the next step's forward passes.
        copies_every: steps from one copying of the state to second owners to the next; 0 where there are none.
        memory_fraction: share of each device's memory that a plan may use. The rest is the allowance for the driver's
            context, communicators and fragmentation.
        measured: times of ops in the place of those that are worked out; None where nothing was measured.
    """

    launch_seconds: float = 4e-6
    message_seconds: float = 0.0
    waiting_seconds: float = 8e-6
    backward_traffic: float = 2.0
    fuses_pointwise: bool = False
    allows_tf32: bool = False
    optimizer_states: int = 2
    zero: Zero = 0
    offload: str = "none"
    brings_back: bool = False
    host_bandwidth: float = 80e9
    gradient_dtype: str | None = None
    sum_dtype: str | None = None
    feeds_back: bool = False
    bucket_bytes: int = 25 * 2**20
    defers_weights: bool = True
    copies_every: int = 0
    memory_fraction: float = 0.9
    measured: Measured | None = None

    @staticmethod
    def of(config: Config) -> Costs:
        """The starting values with what the user has set.

        Raises:
            ConfigError: settings that contradict each other.
        """
        wanted = config.gradient
        if wanted.error_feedback and wanted.sum_dtype in ("own", wanted.dtype):
            raise ConfigError(
                "gradient.error_feedback has no effect: gradients are not rounded before they are summed (gradient.sum_dtype: "
                f"{wanted.sum_dtype}, gradient.dtype: {wanted.dtype})",
                hint="set gradient.sum_dtype to bf16 or fp16, or leave gradient.error_feedback out",
            )
        accumulated, summed = (None if dtype == "own" else HALVES.get(dtype, dtype) for dtype in (wanted.dtype, wanted.sum_dtype))
        return Costs(
            message_seconds=config.estimate.message_seconds,
            fuses_pointwise=config.estimate.fuses_pointwise or bool(config.runtime.compile),
            allows_tf32=config.estimate.allows_tf32 or config.precision.dtype == "tf32",
            optimizer_states=config.memory.optimizer_states,
            zero=_zero(config.memory.zero),
            offload=config.memory.offload,
            brings_back=config.memory.offload_as_needed,
            gradient_dtype=accumulated,
            sum_dtype=summed,
            feeds_back=wanted.error_feedback,
            bucket_bytes=config.communication.bucket_bytes,
            defers_weights=config.communication.defer_weights,
            copies_every=config.memory.redundancy_steps if config.memory.redundancy != "0" else 0,
            memory_fraction=config.memory.fraction,
        )

    @staticmethod
    def for_model(config: Config, graph: ModelGraph, cluster: Cluster) -> Costs:
        """The starting values with what the user has set, and with the times of the profile that ``cluster.profile`` names.

        Raises:
            ConfigError: the profile cannot be read, or is of another model or of other devices.
        """
        costs, file = Costs.of(config), config.cluster.profile
        if isinstance(costs.zero, tuple):
            _check_patterns(costs.zero, [each.name for each in graph.parameters if each.kind == "parameter"])
        return costs if file is None else replace(costs, measured=measured(read_profile(file), graph, cluster))

    @property
    def on_host(self) -> tuple[str, ...]:
        """The forms of parameters that live on hosts, by name."""
        return _ON_HOST.get(self.offload, ())

    @property
    def offloads_activations(self) -> bool:
        """Whether what is kept for backward passes waits in the memory of hosts."""
        return self.offload == "activations"

    def capacity(self, device: Device) -> int:
        """Bytes that a plan may use on a device."""
        return int(device.memory * self.memory_fraction)


def _zero(stated: Choice) -> Zero:
    """What ``memory.zero`` states; 0 where it is left open."""
    if isinstance(stated, tuple):
        return tuple((pattern, int(stage)) for pattern, stage in stated)
    return 0 if stated == "auto" else int(stated)


def _check_patterns(zero: tuple[tuple[str, int], ...], names: list[str]) -> None:
    """Checks that each pattern but the last has a parameter."""
    if idle := idle_patterns([pattern for pattern, _ in zero], names):
        raise ConfigError(
            f"memory.zero: no parameter uses {', '.join(map(repr, idle))} (a parameter uses the first pattern that matches its name)",
            hint=f"the names are {first_few(names)}",
        )
