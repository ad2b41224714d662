"""What became of the configuration keys of EPL, the library whose key names Whale keeps: one table, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STRATEGIES: Mapping[str, str] = {"PreferForward": "gpipe", "PreferBackward": "1f1b"}
"""Values of EPL's ``pipeline.strategy`` and the ``pipeline.schedule`` that each is carried to."""


AUTO = "auto.auto_parallel"
"""A flag of EPL that asks for what Whale does anyway."""

OF_THE_PAPER: Mapping[str, str] = {
    "num_micro_batch": "pipeline.num_micro_batch",
    "num_task_graph": "pipeline.num_stages",
    "auto_parallel": AUTO,
}
"""Keys as Whale's paper writes them, without a section."""


@dataclass(frozen=True, slots=True)
class EplKey:
    """One key of EPL.

    Attributes:
        name: ``section.key``.
        carries: whether Whale accepts it.
        note: what it means in Whale; for a key that is refused, why, and what to do instead.
    """

    name: str
    carries: bool
    note: str


EPL_KEYS = (
    EplKey("pipeline.num_micro_batch", True, "the same"),
    EplKey("pipeline.num_stages", True, "the same; no `auto.auto_parallel` is needed with it"),
    EplKey("pipeline.strategy", True, "`PreferForward` is `pipeline.schedule: gpipe`, `PreferBackward` is `pipeline.schedule: 1f1b`"),
    EplKey("cluster.colocate_split_and_replicate", True, "the same"),
    EplKey("cluster.device_place_prefer_intra_node", True, "the same"),
    EplKey("cluster.run_visible_devices", False, "which GPUs a run sees is said by the environment variable CUDA_VISIBLE_DEVICES"),
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
    EplKey("zero.level", False, "ZeRO, the optimizer's state cut over replicas, is not there yet"),
    EplKey("offload.level", False, "offloading to the host's memory is not there yet; cut the model into more stages"),
    EplKey("amp.level", False, "automatic mixed precision is not there yet; a model may be built in bfloat16"),
    EplKey("amp.debug_log", False, "automatic mixed precision is not there yet"),
    EplKey("amp.loss_scale", False, "loss scaling is not there yet; bfloat16 needs none"),
    EplKey("optimizer.num_apply_group", False, "PyTorch's optimizers group parameters themselves (`foreach`, `fused`)"),
    EplKey("communication.num_communicators", False, "the plan makes one communicator for each set of ranks that needs one"),
    EplKey("communication.sparse_as_dense", False, "gradients are dense; sparse gradients are not supported"),
    EplKey("communication.max_splits", False, "replaced by `communication.bucket_bytes`, the size of a gradient bucket"),
    EplKey("communication.fp16", False, "gradients travel in the parameters' own dtype, so that sums stay exact"),
    EplKey("communication.fp16_scale", False, "gradients travel in the parameters' own dtype, so nothing is scaled"),
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
    EplKey("io.unbalanced_io_slicing", False, "`engine.loader` slices as the plan's shares say, unevenly where devices are unlike"),
    EplKey("io.drop_last_files", False, "`engine.loader` cuts a short last batch in proportion; nothing need be dropped"),
)
"""Every key of EPL's configuration."""

REFUSED: Mapping[str, EplKey] = {entry.name: entry for entry in EPL_KEYS if not entry.carries}
"""The keys of EPL that are an error, by name."""
