"""The sections of the configuration: every key with its default; and the keys of EPL, whose names Whale keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from whale.config.keys import Key, ValueRule, a_range, above, at_least, between, from_up_to, key, keys_of

SCHEDULES = (
    "gpipe", "1f1b", "eager_1f1b", "interleaved", "aiao", "aiao_early_loss", "zb_h1", "zb_h2", "zb_v",
    "recompute_early", "last_no_recompute", "shifted_critical_path",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    num_micro_batch: int = key(1, "micro-batches per model replica", rule=at_least(1))
    num_stages: int | None = key(None, "stages of a model without scopes; null: the planner decides", rule=at_least(1))
    schedule: str = key("1f1b", "order of forward and backward passes", choices=SCHEDULES)
    num_chunks: int = key(1, "model chunks per virtual device, for interleaved schedules", rule=at_least(1))
    group_size: int | None = key(
        None, "micro-batches that an interleaved schedule runs per chunk in turn; null: the planner decides", rule=at_least(1)
    )
    receive_early: bool = key(
        True, "start to receive a message one pass before the one that needs it; false: right before, for networks that stall other kernels"
    )


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    file: str | None = key(
        None, "cluster file; in a recipe relative to the recipe, elsewhere to the working directory; null: this machine's devices"
    )
    devices: str | None = key(
        None,
        "devices to plan for: names of devices, hosts or models, separated by commas, such as V100:2,host1/*; null: all",
    )
    profile: str | None = key(None, "file written by `whale profile`, found as `cluster.file` is; null: computed prices")
    partial: bool = key(
        False,
        "allow fewer ranks than the cluster file has devices, matched by host and model; `whale run --elastic` sets it",
    )
    colocate_split_and_replicate: bool = key(False, "put all TaskGraphs of a replica on the same devices")
    device_place_prefer_intra_node: bool = key(True, "prefer to keep one model replica within one host")


@dataclass(frozen=True, slots=True)
class MemorySettings:
    fraction: float = key(0.9, "share of each device's memory that a plan may use", rule=between(0, 1))
    optimizer_states: int = key(
        2, "tensors that the optimizer keeps per parameter: Adam 2, SGD with momentum 1, plain SGD 0", rule=at_least(0)
    )
    zero: str | tuple[tuple[str, str], ...] = key(
        "auto",
        "what is sharded among the devices that hold a parameter (ZeRO): 0: nothing; 1: optimizer state; 2: also summed"
        " gradients; 3: also weights; auto: 2 where a plan needs it to fit or to recompute less, 3 where nothing fits "
        "otherwise",
        choices=("0", "1", "2", "3", "auto"),
        by_name=("0", "1", "2", "3"),
    )
    zero_within: str = key(
        "auto",
        "with `memory.zero`, which devices keep one copy of the sharded state: all: all of them; host: those of each host, so that"
        " only sums of gradients go from host to host; auto: host where that fits and is faster",
        choices=("all", "host", "auto"),
    )
    offload: str = key(
        "none",
        "what is kept in host memory: optimizer: state and the weights that it steps, on the CPU; optimizer+parameters:"
        " also weights; activations; auto: what does not fit, where nothing fits otherwise",
        choices=("none", "optimizer", "optimizer+parameters", "activations", "auto"),
    )
    offload_as_needed: bool = key(False, "offload only as much of it as does not fit on the device; false: all of it")
    redundancy: str = key(
        "0",
        "hosts (devices, if there is one host) that may be lost at once without losing a step under `whale run --elastic`: "
        "1: weights and optimizer state are in the memory of two",
        choices=("0", "1"),
    )
    redundancy_steps: int = key(1, "with `memory.redundancy: 1`, steps between two copies", rule=at_least(1))


@dataclass(frozen=True, slots=True)
class PrecisionSettings:
    dtype: str | tuple[tuple[str, str], ...] = key(
        "float32",
        "compute type, as under torch.autocast, over parameters and optimizer state in the model's own types; float32: "
        "the model's types; tf32: the same with TensorFloat-32 products; auto: bf16 where all devices have it, else "
        "fp16; float32 on CPUs; half: bf16 on each device that has it, fp16 on the others",
        choices=("float32", "tf32", "bf16", "fp16", "auto", "half"),
        by_name=("float32", "bf16", "fp16", "auto", "half"),
        rule=ValueRule(
            "one type besides float32", lambda value: isinstance(value, str) or len({own for _, own in value} - {"float32"}) <= 1
        ),
    )
    loss_scale: float = key(
        65536.0,
        "first loss scale of fp16",
        rule=ValueRule("at least 1 and a power of two", lambda value: 1 <= value <= 2.0**127 and math.frexp(value)[0] == 0.5),
    )
    loss_scale_growth_steps: int | None = key(
        2000, "consecutive steps with finite gradients after which the loss scale doubles; null: it never changes", rule=at_least(1)
    )
    loss_scale_hysteresis: int = key(
        1, "number of steps without, since the loss scale last doubled, from which on each halves it", rule=at_least(1)
    )


@dataclass(frozen=True, slots=True)
class GradientSettings:
    clip_norm: float | None = key(None, "largest global norm of all gradients; null: no clipping", rule=above(0))
    skip_nonfinite: bool = key(
        False, "skip steps whose loss or gradients are not finite, with a warning; waits for the device in each step"
    )
    dtype: str = key(
        "own",
        "type in which each device accumulates gradients; own: that of the parameter",
        choices=("own", "float32", "bf16", "fp16"),
    )
    sum_dtype: str = key(
        "own",
        "type in which gradients are summed over devices; own: that in which they are accumulated",
        choices=("own", "float32", "bf16", "fp16"),
    )
    error_feedback: bool = key(
        False, "add what rounding to `gradient.sum_dtype` has lost to the next gradient; takes the memory of the summed gradients"
    )


@dataclass(frozen=True, slots=True)
class CommunicationSettings:
    bucket_bytes: int = key(25 * 2**20, "size of a gradient bucket", rule=at_least(1), unit="B")
    timeout_seconds: float = key(300.0, "longest wait for another rank before the run fails", rule=above(0))
    overlap: bool | None = key(
        None, "compute the rows of split stages in two halves, one while the other communicates; null: where that is predicted to be faster"
    )
    defer_weights: bool = key(
        True,
        "with `memory.zero` 1 or 2, send updated weights during the next forward passes; false: before the step ends",
    )
    sync_steps: int = key(
        1,
        "steps that the replicas of each host take on their own before weights and optimizer state are averaged over all hosts; 1: "
        "gradients are summed over all of them in each step",
        rule=at_least(1),
    )
    outer_rate: float = key(
        1.0, "with `communication.sync_steps`, learning rate of the outer optimizer; 1: weights become the average", rule=above(0)
    )
    outer_momentum: float = key(
        0.0, "with `communication.sync_steps`, Nesterov momentum of the outer optimizer (DiLoCo: 0.9 at rate 0.7)", rule=from_up_to(0, 1)
    )
    gather_rows: bool = key(True, "replicas gather the rows for ops that mix samples; false: each uses its own rows, with a warning")


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    seed: int = key(0, "seed of dropout and of weights that Whale initialises", rule=at_least(0))
    num_sizes: int = key(32, "captures kept for batches of other sizes (lengths) than the example's", rule=at_least(1))
    retrace: str = key(
        "budget",
        "when the model is traced again to detect changes: budget: where `runtime.retrace_share` pays for it; always: before each step; "
        "off: never",
        choices=("budget", "always", "off"),
    )
    retrace_share: float = key(
        0.01, "largest share of the time since the first step that tracing again may take; the first minute has none", rule=between(0, 1)
    )
    compile: bool | None = key(
        None,
        "compile the ops of each stage with torch.compile; null: if the model was given through torch.compile",
    )
    compile_mode: str = key(
        "default",
        "mode of torch.compile; modes with CUDA graphs are none, for their memory does not outlive the next micro-batch",
        choices=("default", "max-autotune-no-cudagraphs"),
    )
    progress: bool = key(
        False, "show loss, samples and tokens per second, norm, learning rate and memory on the loader's bar, or every 10 s"
    )
    log_file: str | None = key(None, "file to which rank 0 adds a line of JSON per step; null: none")
    rebalance: str = key(
        "off",
        "what to do when device speeds persistently differ from the plan: off: report it; advise: also report what "
        "another plan would gain; on: move to that plan where it pays",
        choices=("off", "advise", "on"),
    )
    rebalance_horizon: float = key(300.0, "seconds of training within which a move must save more than it takes", rule=above(0), unit="s")
    save_on_sigterm: str | None = key(
        None,
        "folder in which all ranks save a checkpoint step_N when SIGTERM reaches any of them, and exit with 143; null: "
        "SIGTERM ends a rank at once",
    )
    keep_on_fault: str | None = key(
        None,
        "folder in host memory in which surviving ranks leave the last whole step for `engine.resume`; `whale run "
        "--elastic` sets it; null: none",
    )


@dataclass(frozen=True, slots=True)
class TraceSettings:
    directory: str | None = key(None, "folder for recorded steps, written by rank 0 as trace.json and report.html; null: none")
    first_step: int = key(2, "steps of this run before the first recorded one", rule=at_least(0))
    num_steps: int = key(3, "steps that are recorded", rule=at_least(1))


@dataclass(frozen=True, slots=True)
class RecomputeSettings:
    policy: str | tuple[tuple[int, float | str], ...] | tuple[tuple[str, str], ...] = key(
        "none",
        "which activations are recomputed: full: all, stage by stage; blocks: all, block by block; selective: those of "
        "attention; auto: as many as memory demands; a share is of a stage's blocks; by name, those of modules",
        choices=("none", "auto", "full", "blocks", "selective"),
        by_stage=("none", "full", "blocks", "selective"),
        by_name=("recompute", "keep"),
        named="module",
    )


@dataclass(frozen=True, slots=True)
class PlanningSettings:
    search: str = key(
        "auto",
        "auto: search for the best plan within scopes, replicas and settings; off: use the settings and their defaults",
        choices=("auto", "off"),
    )
    objective: str = key(
        "step_time",
        "what the search minimises: step_time; cost of a sample, by the prices of the cluster file; memory of the fullest device",
        choices=("step_time", "cost", "memory"),
    )
    batch_rows: str | None = key(
        None,
        "range of global batch sizes to search, such as 64..256; null: the rows of the batch",
        rule=a_range(),
    )
    effort: int = key(
        100,
        "largest number of plans that a search makes; large or unfit ones count for several, and six more are made while nothing fits",
        rule=at_least(1),
    )


@dataclass(frozen=True, slots=True)
class EstimateSettings:
    """Assumptions of predictions about what was not measured."""

    fuses_pointwise: bool = key(
        False, "pointwise ops run in one kernel with the only op that reads them, as kernels fused by hand; `runtime.compile` fuses more"
    )
    allows_tf32: bool = key(False, "float32 matrix products use TensorFloat-32 where the device has it")
    message_seconds: float = key(
        0.0, "cost of starting a message or collective besides the latency of its link", rule=at_least(0), unit="s"
    )
    communicator_bytes: int | None = key(
        None, "NCCL's buffers on each device of a communicator; null: by links, 14 MiB and more", rule=at_least(0), unit="B"
    )


# in the order in which they print
SECTIONS: Mapping[str, type[object]] = {
    "pipeline": PipelineSettings,
    "cluster": ClusterSettings,
    "memory": MemorySettings,
    "precision": PrecisionSettings,
    "gradient": GradientSettings,
    "communication": CommunicationSettings,
    "runtime": RuntimeSettings,
    "recompute": RecomputeSettings,
    "trace": TraceSettings,
    "planning": PlanningSettings,
    "estimate": EstimateSettings,
}

# by ``section.key``
KEYS: Mapping[str, Key] = {name: found for section, kind in SECTIONS.items() for name, found in keys_of(section, kind).items()}


STRATEGIES: Mapping[str, str] = {"PreferForward": "gpipe", "PreferBackward": "1f1b"}  # EPL's ``pipeline.strategy`` as ``pipeline.schedule``


AUTO = "auto.auto_parallel"  # a flag of EPL for what Whale does anyway

# keys as Whale's paper writes them, without a section
OF_THE_PAPER: Mapping[str, str] = {
    "num_micro_batch": "pipeline.num_micro_batch",
    "num_task_graph": "pipeline.num_stages",
    "auto_parallel": AUTO,
}


@dataclass(frozen=True, slots=True)
class EplKey:
    """One key of EPL."""

    name: str  # ``section.key``
    carries: bool  # whether Whale accepts it
    note: str  # its meaning in Whale; if refused, why, and what to do instead


EPL_KEYS = (
    EplKey("pipeline.num_micro_batch", True, "the same"),
    EplKey("pipeline.num_stages", True, "the same; no `auto.auto_parallel` is needed with it"),
    EplKey("pipeline.strategy", True, "`PreferForward` is `pipeline.schedule: gpipe`, `PreferBackward` is `pipeline.schedule: 1f1b`"),
    EplKey("cluster.colocate_split_and_replicate", True, "the same"),
    EplKey("cluster.device_place_prefer_intra_node", True, "the same"),
    EplKey("cluster.run_visible_devices", False, "the environment variable CUDA_VISIBLE_DEVICES decides which GPUs a run sees"),
    EplKey(
        "auto.auto_parallel", True, "accepted and not needed: a model without scopes is always cut as `pipeline.num_stages` says, or copied"
    ),
    EplKey("gradient_checkpoint.type", False, "replaced by `recompute.policy`"),
    EplKey(
        "gradient_checkpoint.end_taskgraph",
        False,
        "replaced by `recompute.policy`: shares by stage, or `auto`, with which the planner picks",
    ),
    EplKey("gradient_checkpoint.check_gradients", False, "Whale's own tests check the gradients"),
    EplKey("zero.level", False, "replaced by `memory.zero`: `v0` is 1, `v1` is 2"),
    EplKey("offload.level", False, "replaced by `memory.offload: optimizer`, which keeps what the optimizer steps on the host"),
    EplKey("amp.level", False, "replaced by `precision.dtype`: `O1` is `fp16`"),
    EplKey("amp.debug_log", False, "`engine.loss_scale` is the scale of the next step"),
    EplKey("amp.loss_scale", False, "replaced by `precision.loss_scale`; `bf16` needs none"),
    EplKey(
        "optimizer.num_apply_group",
        False,
        "torch's elementwise optimizers step 256 MiB of parameters at a time where a call needs memory for all (`foreach`)",
    ),
    EplKey("communication.num_communicators", False, "the plan makes one communicator for each set of ranks that needs one"),
    EplKey(
        "communication.sparse_as_dense",
        False,
        "sparse gradients are summed as values and indices; `sparse=False` in the embedding makes them dense",
    ),
    EplKey("communication.max_splits", False, "replaced by `communication.bucket_bytes`, the size of a gradient bucket"),
    EplKey("communication.fp16", False, "replaced by `gradient.sum_dtype: fp16`"),
    EplKey("communication.fp16_scale", False, "`precision.dtype: fp16` scales the loss, and with it what `gradient.sum_dtype` rounds"),
    EplKey(
        "communication.clip_after_allreduce",
        False,
        "replaced by `gradient.clip_norm`, which always clips the global gradient after its sum",
    ),
    EplKey(
        "communication.gradients_reduce_method",
        False,
        "the loss decides: a mean is averaged over the global batch, a sum is summed, both exactly, whatever the shares",
    ),
    EplKey("io.slicing", False, "`engine.loader(dataset, global_batch_size=...)` gives every rank its own share of the rows"),
    EplKey("io.unbalanced_io_slicing", False, "`engine.loader` slices as the plan's shares say, unevenly where devices differ"),
    EplKey("io.drop_last_files", False, "`engine.loader` cuts a short last batch in proportion; nothing need be dropped"),
)

REFUSED: Mapping[str, EplKey] = {entry.name: entry for entry in EPL_KEYS if not entry.carries}  # by name
