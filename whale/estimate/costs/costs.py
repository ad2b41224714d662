"""`Costs`: the assumptions of estimates that belong to no device or link, with their default values."""

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
from whale.ir.plan import Rounds, Zero
from whale.ir.profile import read_profile

_ON_HOST = {"optimizer": ("optimizer",), "optimizer+parameters": ("optimizer", "compute")}


@dataclass(frozen=True, slots=True)
class Costs:
    """What estimates assume."""

    launch_seconds: float = 4e-6  # device time of one kernel besides its work
    # of starting one message or collective, besides the link's latency; in a split group also host time, and the host runs ahead
    message_seconds: float = 0.0
    # host time of F, I and W each of an op with deferred weight gradients, which Python runs, where not measured: 26 us for all three
    # on a current CPU core; unknown for GPUs
    waiting_seconds: float = 8e-6
    backward_traffic: float = 2.0  # relative to the forward pass: a backward pass reads the gradient and the saved values
    fuses_pointwise: bool = False  # whether pointwise ops run in one kernel with their only reader, as kernels fused by hand
    compiles: bool = False  # whether a compiler makes the kernels (`whale.estimate.costs.fusion`)
    allows_tf32: bool = False  # whether float32 matrix products run in TensorFloat-32 where the device has it
    optimizer_states: int = 2  # tensors that the optimizer keeps per parameter (Adam 2)
    zero: Zero = 0  # ZeRO stage, of all parameters or by name pattern
    zero_within: str = "auto"  # as ``memory.zero_within``
    offload: str = "none"  # as ``memory.offload``
    brings_back: bool = False  # whether as much of that as fits returns to the devices
    host_bandwidth: float = 80e9  # bytes per second of a host's memory, shared by its devices; default 40 % of eight channels DDR4-3200
    gradient_dtype: str | None = None  # in which gradients accumulate; None for the parameter's
    sum_dtype: str | None = None  # in which gradients are summed across devices; None for their own
    feeds_back: bool = False  # whether the rounding error of that is added to the next gradient
    rounds: Rounds | None = None  # as ``communication.sync_steps`` and the outer optimizer say, without groups; None for none
    bucket_bytes: int = 25 * 2**20  # approximate size of a gradient bucket
    defers_weights: bool = True  # whether all-gathers of sharded weights overlap the next step's forward passes
    communicator_bytes: int | None = None  # of NCCL's buffers on each device of a communicator; None: by its links
    copies_every: int = 0  # steps between redundant copies of the state; 0 for none
    memory_fraction: float = 0.9  # usable share of each device; the rest is for the contexts of driver and libraries, fragmentation
    measured: Measured | None = None  # op times that replace computed ones; None for none

    @staticmethod
    def of(config: Config) -> Costs:
        """The defaults with the user's settings.

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
        together = config.communication
        rounds = Rounds((), together.sync_steps, together.outer_rate, together.outer_momentum)
        if rounds.num_steps == 1 and not rounds.is_average:
            raise ConfigError(
                f"communication.outer_rate ({together.outer_rate:g}) and outer_momentum ({together.outer_momentum:g}) have no effect: "
                "communication.sync_steps is 1, so gradients are summed in each step",
                hint="set communication.sync_steps to the steps of a round, such as 32",
            )
        accumulated, summed = (None if dtype == "own" else HALVES.get(dtype, dtype) for dtype in (wanted.dtype, wanted.sum_dtype))
        return Costs(
            message_seconds=config.estimate.message_seconds,
            fuses_pointwise=config.estimate.fuses_pointwise,
            compiles=bool(config.runtime.compile),
            allows_tf32=config.estimate.allows_tf32 or config.precision.dtype == "tf32",
            optimizer_states=config.memory.optimizer_states,
            zero=_zero(config.memory.zero),
            zero_within=_zero_within(config),
            offload=config.memory.offload,
            brings_back=config.memory.offload_as_needed,
            gradient_dtype=accumulated,
            sum_dtype=summed,
            feeds_back=wanted.error_feedback,
            rounds=None if rounds.num_steps == 1 else rounds,
            bucket_bytes=config.communication.bucket_bytes,
            defers_weights=config.communication.defer_weights,
            communicator_bytes=config.estimate.communicator_bytes,
            copies_every=config.memory.redundancy_steps if config.memory.redundancy != "0" else 0,
            memory_fraction=config.memory.fraction,
        )

    @staticmethod
    def for_model(config: Config, graph: ModelGraph, cluster: Cluster) -> Costs:
        """The same, with the times of the profile that ``cluster.profile`` names.

        Raises:
            ConfigError: the profile cannot be read, or is of another model or of other devices.
        """
        costs, file = Costs.of(config), config.cluster.profile
        if isinstance(costs.zero, tuple):
            _check_patterns(costs.zero, [each.name for each in graph.parameters if each.kind == "parameter"])
        if file is None:
            return costs
        return replace(costs, measured=measured(read_profile(file), graph, cluster, fused=costs.compiles))

    @property
    def on_host(self) -> tuple[str, ...]:
        """The forms of parameters that live on hosts."""
        return _ON_HOST.get(self.offload, ())

    @property
    def averaged_share(self) -> float:
        """Bytes that are averaged over hosts in the mean step, relative to those of the weights that are stepped; 0 without rounds."""
        return 0.0 if self.rounds is None else (1 + self.optimizer_states) / self.rounds.num_steps

    @property
    def outer_tensors(self) -> int:
        """Tensors that the outer optimizer keeps per parameter: the weights before a round, and momentum."""
        return 0 if self.rounds is None or self.rounds.is_average else 2

    @property
    def offloads_activations(self) -> bool:
        return self.offload == "activations"

    def capacity(self, device: Device) -> int:
        """Bytes that a plan may use on a device."""
        return int(device.memory * self.memory_fraction)


def _zero(stated: Choice) -> Zero:
    """`memory.zero` as stages; 0 where it is open."""
    if isinstance(stated, tuple):
        return tuple((pattern, int(stage)) for pattern, stage in stated)
    return 0 if stated == "auto" else int(stated)


def _zero_within(config: Config) -> str:
    """`memory.zero_within`; copies never take less memory."""
    is_open = config.memory.zero_within == "auto"
    return "all" if is_open and config.planning.objective == "memory" else config.memory.zero_within


def _check_patterns(zero: tuple[tuple[str, int], ...], names: list[str]) -> None:
    """Each pattern but the last must have a parameter."""
    if idle := idle_patterns([pattern for pattern, _ in zero], names):
        raise ConfigError(
            f"memory.zero: no parameter uses {', '.join(map(repr, idle))} (a parameter uses the first pattern that matches its name)",
            hint=f"the names are {first_few(names)}",
        )
