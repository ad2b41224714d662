"""The sections of the configuration: every key with its default, stated here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from whale.config.keys import a_range, above, at_least, between, key

SCHEDULES = (
    "gpipe", "1f1b", "eager_1f1b", "interleaved", "aiao", "aiao_early_loss", "zb_h1", "zb_h2", "zb_v",
    "recompute_early", "last_no_recompute", "shifted_critical_path",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the batch flows through the stages."""

    num_micro_batch: int = key(1, "micro-batches that each model replica cuts its rows into", rule=at_least(1))
    num_stages: int | None = key(None, "stages to cut a model without scopes into; null: scopes, or the planner, say", rule=at_least(1))
    schedule: str = key("1f1b", "order of forward and backward passes", choices=SCHEDULES)
    num_chunks: int = key(1, "model chunks per virtual device, for interleaved schedules", rule=at_least(1))
    group_size: int | None = key(
        None, "micro-batches that an interleaved schedule runs per chunk in turn; null: the planner says", rule=at_least(1)
    )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Which devices there are, and how TaskGraphs are placed on them."""

    file: str | None = key(
        None, "cluster file; in a recipe relative to the recipe, elsewhere to the working directory; null: the devices at hand"
    )
    devices: str | None = key(
        None,
        "which of them to plan for: names of devices, hosts or models with commas between, such as V100:2,host1/*; null: all",
    )
    profile: str | None = key(
        None, "what `whale profile` has measured of the model on these devices; found as the cluster file is; null: prices are worked out"
    )
    colocate_split_and_replicate: bool = key(False, "put all TaskGraphs of a replica on the same devices")
    device_place_prefer_intra_node: bool = key(True, "prefer to keep one model replica within one host")


@dataclass(frozen=True, slots=True)
class Memory:
    """What the planner may fill."""

    fraction: float = key(0.9, "share of each device's memory that a plan may use", rule=between(0, 1))
    optimizer_states: int = key(
        2, "tensors that the optimizer keeps per parameter: Adam 2, SGD with momentum 1, plain SGD 0", rule=at_least(0)
    )


@dataclass(frozen=True, slots=True)
class Gradient:
    """What is done to gradients before they are applied."""

    clip_norm: float | None = key(None, "largest global norm of all gradients; null: not clipped", rule=above(0))
    skip_nonfinite: bool = key(
        False, "leave out steps whose loss or gradients are infinite or no number, with a warning; waits for the device in each step"
    )


@dataclass(frozen=True, slots=True)
class Communication:
    """How ranks talk."""

    bucket_bytes: int = key(25 * 2**20, "gradients are synchronised in buckets of about this size", rule=at_least(1), unit="B")
    timeout_seconds: float = key(300.0, "longest wait for another rank before the run is ended", rule=above(0))
    overlap: bool | None = key(
        None, "compute the rows of split stages in two halves, one while the other's messages travel; null: where that is predicted to pay"
    )
    gather_rows: bool = key(
        True, "replicas gather the rows that ops need which mix samples; false: each computes them on its own rows, with a warning"
    )


@dataclass(frozen=True, slots=True)
class Runtime:
    """How the run is set up."""

    seed: int = key(0, "seed of dropout and of weights that Whale initialises", rule=at_least(0))
    num_sizes: int = key(
        32, "captures kept for batches of other sizes (lengths) than the example's; the least used of more is dropped", rule=at_least(1)
    )
    retrace: str = key(
        "doubling",
        "when the model is traced again, to find that its code computes something else than was captured: doubling: after 1, 2, 4, 8 ... "
        "steps; always: before each; off: never",
        choices=("doubling", "always", "off"),
    )


@dataclass(frozen=True, slots=True)
class Trace:
    """Which steps are recorded."""

    directory: str | None = key(
        None, "folder for the record of some steps, written by rank 0 as trace.json and report.html; null: nothing is recorded"
    )
    first_step: int = key(2, "steps of this run that are done before the first recorded one", rule=at_least(0))
    num_steps: int = key(3, "steps that are recorded", rule=at_least(1))


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which activations are computed again in the backward pass instead of kept."""

    policy: str | tuple[tuple[int, float | str], ...] = key(
        "none",
        "which activations are computed again: none; full: all, each stage as a whole; blocks: all, block by block; selective: those of "
        "attention; auto: as many as memory demands; a share is of a stage's blocks",
        choices=("none", "auto", "full", "blocks", "selective"),
        by_stage=("none", "full", "blocks", "selective"),
    )


@dataclass(frozen=True, slots=True)
class Planning:
    """How a plan is looked for."""

    search: str = key(
        "auto",
        "auto: search for the best plan; what scopes, replicas and settings fix stays as it is; off: take what the settings and their "
        "defaults say",
        choices=("auto", "off"),
    )
    objective: str = key(
        "step_time",
        "what the search makes least: step_time; cost: of a sample, by the prices of the cluster file; memory: of the fullest device",
        choices=("step_time", "cost", "memory"),
    )
    batch_rows: str | None = key(
        None,
        "rows of the global batch that the search may choose, such as 64..256: the most samples per second, or the best by the objective; "
        "null: as many as the batch has",
        rule=a_range(),
    )
    effort: int = key(
        100,
        "plans that a search makes at most, and six more while nothing fits; those of many devices, stages and micro-batches, "
        "or with split stages, count for several",
        rule=at_least(1),
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What predictions assume of how ops run, where nothing was measured."""

    fuses_pointwise: bool = key(
        False, "pointwise ops run in one kernel with the op that alone reads them, as with a compiler or kernels written by hand"
    )
    allows_tf32: bool = key(False, "float32 matrix products run in TensorFloat-32 where the device has it")
    message_seconds: float = key(
        0.0, "what starting a message or collective costs beside the latency of its link", rule=at_least(0), unit="s"
    )
