"""Keys of other systems' configuration files, and what each is in Whale: of DeepSpeed, Accelerate and Megatron.

``docs/coming_from.md`` holds the same tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

System = Literal["DeepSpeed", "Accelerate", "Megatron"]


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key of another system."""

    system: System
    name: str  # as in its file, sections before a point; ``section.*`` for all other keys of a section
    note: str  # what it is in Whale, or that there is no such thing


_NO_NEED = "not needed"
_ROWS = "rows of the batch that `engine.step` gets: `engine.loader(dataset, global_batch_size=...)`"
_ACCUMULATE = "`pipeline.num_micro_batch`, parts of one batch; or `engine.forward_backward` several times, then `engine.update`"
_CLIP = "`gradient.clip_norm`"
_OPTIMIZER_ON_HOST = "`memory.offload: optimizer`; nothing is kept on NVMe"
_WEIGHTS_ON_HOST = "`memory.offload: optimizer+parameters`; nothing is kept on NVMe"
_FIXED_SCALE = "`precision.loss_scale` with `precision.loss_scale_growth_steps: null`; without a value the scale follows the gradients"
_GROWTH = "`precision.loss_scale_growth_steps`"
_HYSTERESIS = "`precision.loss_scale_hysteresis`; it is full again when the scale doubles"
_LEAST_SCALE = "none: a step that is not finite at a scale of 1 is an error"
_LOG = "`runtime.log_file`, a line of JSON per step"
_BUCKETS = "`communication.bucket_bytes`, in bytes, for gradients and weights"
_ONE_AHEAD = "not set: weights are gathered bucket by bucket, one ahead"
_IN_SCRIPT = "an argument of `whale.parallelize`"
_LAUNCHER = "a flag of `whale run`"

# by system: (name, note)
_KEYS: Mapping[System, tuple[tuple[str, str], ...]] = {
    "DeepSpeed": (
        ("train_batch_size", _ROWS),
        ("train_micro_batch_size_per_gpu", "`micro_batch_rows` of a written plan; the planner decides otherwise"),
        ("gradient_accumulation_steps", _ACCUMULATE),
        ("gradient_clipping", _CLIP),
        ("prescale_gradients", f"{_NO_NEED}: the loss decides what is averaged, exactly"),
        ("gradient_predivide_factor", f"{_NO_NEED}: the loss decides what is averaged, exactly"),
        ("sparse_gradients", f"{_NO_NEED}: gradients of `nn.Embedding(sparse=True)` are summed as values and indices"),
        ("communication_data_type", "`gradient.sum_dtype`"),
        ("data_types.grad_accum_dtype", "`gradient.dtype`"),
        ("seed", "`runtime.seed`"),
        ("fp16.enabled", "`precision.dtype: fp16`"),
        ("fp16.loss_scale", _FIXED_SCALE),
        ("fp16.initial_scale_power", "`precision.loss_scale`, 2 to this power"),
        ("fp16.loss_scale_window", _GROWTH),
        ("fp16.hysteresis", _HYSTERESIS),
        ("fp16.min_loss_scale", _LEAST_SCALE),
        ("fp16.*", "`precision.dtype: fp16`: parameters and optimizer state keep the types of the model"),
        ("bf16.enabled", "`precision.dtype: bf16`"),
        ("bf16.*", "`precision.dtype: bf16`: parameters and optimizer state keep the types of the model"),
        ("amp.enabled", "`precision.dtype`"),
        ("amp.opt_level", "`precision.dtype`: `O1` is `fp16`"),
        ("zero_optimization.stage", "`memory.zero`, the same numbers"),
        ("zero_optimization.offload_optimizer", _OPTIMIZER_ON_HOST),
        ("zero_optimization.offload_param", _WEIGHTS_ON_HOST),
        ("zero_optimization.reduce_bucket_size", f"{_BUCKETS}; DeepSpeed's counts elements"),
        ("zero_optimization.allgather_bucket_size", f"{_BUCKETS}; DeepSpeed's counts elements"),
        ("zero_optimization.overlap_comm", "always: a bucket is summed when its last gradient is there"),
        ("zero_optimization.contiguous_gradients", "always: gradients are views of their buckets"),
        ("zero_optimization.reduce_scatter", "always, where `memory.zero` is 1 or more"),
        ("zero_optimization.allgather_partitions", "always, where `memory.zero` is 1 or more"),
        ("zero_optimization.stage3_prefetch_bucket_size", _ONE_AHEAD),
        ("zero_optimization.stage3_max_live_parameters", _ONE_AHEAD),
        ("zero_optimization.stage3_max_reuse_distance", _ONE_AHEAD),
        ("zero_optimization.stage3_param_persistence_threshold", "`memory.zero` by name: `{\"*norm*\": 1, \"*\": 3}`"),
        (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "`engine.state_dict(rank=0)`, or `whale checkpoint export` of a checkpoint",
        ),
        ("zero_optimization.zero_hpz_partition_size", "`memory.zero_within: host`, which keeps the optimizer state on each host too"),
        ("zero_optimization.mics_shard_size", "`memory.zero_within: host`: the groups are the hosts"),
        ("zero_optimization.zero_quantized_weights", "none"),
        ("zero_optimization.zero_quantized_gradients", "none; `gradient.sum_dtype` halves the bytes"),
        ("zero_optimization.*", f"{_NO_NEED} with `memory.zero`"),
        ("activation_checkpointing.cpu_checkpointing", "`memory.offload: activations`"),
        ("activation_checkpointing.*", "`recompute.policy`"),
        ("optimizer.*", f"{_IN_SCRIPT}: `optimizer=partial(torch.optim.AdamW, lr=...)`"),
        ("scheduler.*", f"{_IN_SCRIPT}: `scheduler=partial(...)`, of `torch.optim.lr_scheduler`"),
        ("zero_allow_untested_optimizer", f"{_NO_NEED}: any optimizer; where a parameter is cut, one that steps each element by itself"),
        ("zero_force_ds_cpu_optimizer", f"{_NO_NEED}: torch's own optimizers step on hosts too, with `fused=True` fastest"),
        ("tensor_parallel.autotp_size", "`split` of a written plan, or `whale.split` in the model"),
        ("pipeline.stages", "`pipeline.num_stages`"),
        ("pipeline.partition", f"{_NO_NEED}: stages are cut by the time of their ops; `blocks` of a written plan fixes them"),
        ("pipeline.activation_checkpoint_interval", "`recompute.policy`"),
        ("elasticity.*", "`whale run --elastic LEAST:MOST`"),
        ("autotuning.*", f"{_NO_NEED}: `planning.search` is `auto` by default"),
        ("checkpoint.*", f"{_NO_NEED}: any plan reads the checkpoints of any other"),
        ("compression_training.*", "none"),
        ("data_efficiency.*", "none"),
        ("curriculum_learning.*", "none"),
        ("compile.*", "`runtime.compile`"),
        ("aio.*", "none: nothing is kept on NVMe"),
        ("wall_clock_breakdown", "`trace.directory`: recorded steps, as `trace.json` and a page"),
        ("flops_profiler.*", "`whale profile`, and `trace.directory`"),
        ("comms_logger.*", "`trace.directory`: recorded steps, as `trace.json` and a page"),
        ("steps_per_print", _LOG),
        ("tensorboard.*", _LOG),
        ("wandb.*", _LOG),
        ("csv_monitor.*", _LOG),
    ),
    "Accelerate": (
        ("compute_environment", _NO_NEED),
        ("same_network", _NO_NEED),
        ("debug", f"{_NO_NEED}: ranks compare batches and settings in every step"),
        ("distributed_type", f"{_NO_NEED}: the plan says what is copied, cut and sharded"),
        ("mixed_precision", "`precision.dtype`: `no` is `float32`; `fp8` is none"),
        ("num_processes", f"{_LAUNCHER}: `--ranks`, of one host"),
        ("num_machines", f"{_LAUNCHER}: `--nnodes`"),
        ("machine_rank", f"{_LAUNCHER}: `--node-rank`"),
        ("main_process_ip", f"{_LAUNCHER}: `--rdzv-endpoint HOST:PORT`"),
        ("main_process_port", f"{_LAUNCHER}: `--rdzv-endpoint HOST:PORT`"),
        ("rdzv_backend", f"{_LAUNCHER}: `--rdzv-backend`"),
        ("gpu_ids", "the environment variable CUDA_VISIBLE_DEVICES"),
        ("use_cpu", f"{_NO_NEED}: ranks without a GPU compute on the CPU"),
        ("downcast_bf16", "none: TPUs are not supported"),
        ("dynamo_config.*", "`runtime.compile`"),
        (
            "fsdp_config.fsdp_sharding_strategy",
            "`memory.zero`: `FULL_SHARD` is 3, `SHARD_GRAD_OP` 2, `NO_SHARD` 0; `HYBRID_SHARD` and `HYBRID_SHARD_ZERO2` are 3 and 2 with "
            "`memory.zero_within: host`",
        ),
        ("fsdp_config.fsdp_reshard_after_forward", "`memory.zero`: `true` is 3, `false` is 2; as text as `fsdp_sharding_strategy`"),
        ("fsdp_config.fsdp_offload_params", "`memory.offload: optimizer+parameters`"),
        ("fsdp_config.fsdp_activation_checkpointing", "`recompute.policy: blocks`; `auto` recomputes no more than memory demands"),
        ("fsdp_config.fsdp_auto_wrap_policy", f"{_NO_NEED}: buckets follow the order in which ops read weights"),
        ("fsdp_config.fsdp_transformer_layer_cls_to_wrap", f"{_NO_NEED}: buckets follow the order in which ops read weights"),
        ("fsdp_config.fsdp_min_num_params", _BUCKETS),
        ("fsdp_config.fsdp_backward_prefetch", _ONE_AHEAD),
        ("fsdp_config.fsdp_forward_prefetch", _ONE_AHEAD),
        ("fsdp_config.fsdp_limit_all_gathers", _ONE_AHEAD),
        (
            "fsdp_config.fsdp_state_dict_type",
            "`engine.state_dict(rank=0)` has whole weights; `engine.save` writes the part of each rank, which any plan reads",
        ),
        ("fsdp_config.fsdp_cpu_ram_efficient_loading", "build the model on the meta device: each rank makes its part of the weights alone"),
        ("fsdp_config.fsdp_sync_module_states", f"{_NO_NEED}: weights are those of rank 0"),
        ("fsdp_config.*", _NO_NEED),
        ("deepspeed_config.zero_stage", "`memory.zero`, the same numbers"),
        ("deepspeed_config.gradient_accumulation_steps", _ACCUMULATE),
        ("deepspeed_config.gradient_clipping", _CLIP),
        ("deepspeed_config.offload_optimizer_device", _OPTIMIZER_ON_HOST),
        ("deepspeed_config.offload_param_device", _WEIGHTS_ON_HOST),
        ("deepspeed_config.deepspeed_hostfile", "a [cluster file](#hostfiles), where hosts differ"),
        ("deepspeed_config.*", f"{_NO_NEED} with `memory.zero`"),
        ("megatron_lm_config.megatron_lm_tp_degree", "`split` of a written plan, or `whale.split` in the model"),
        ("megatron_lm_config.megatron_lm_pp_degree", "`pipeline.num_stages`"),
        ("megatron_lm_config.megatron_lm_num_micro_batches", "`pipeline.num_micro_batch`"),
        ("megatron_lm_config.megatron_lm_sequence_parallelism", "`more_axes` of a written plan, with the sequence's axis"),
        ("megatron_lm_config.megatron_lm_recompute_activations", "`recompute.policy: selective`"),
        ("megatron_lm_config.megatron_lm_use_distributed_optimizer", "`memory.zero: 1`"),
        ("megatron_lm_config.megatron_lm_gradient_clipping", _CLIP),
    ),
    "Megatron": (
        ("tensor_model_parallel_size", "`split: N`, with `axes`"),
        ("sequence_parallel", "`more_axes`, with the sequence's axis"),
        ("pipeline_model_parallel_size", "`num_stages: N`, of each replica (`pipeline.num_stages`)"),
        ("num_virtual_stages_per_pipeline_rank", "`num_chunks: N`, `schedule: interleaved` (`pipeline.num_chunks`, `pipeline.schedule`)"),
        ("num_layers_per_virtual_pipeline_stage", "`num_chunks`: layers by (stages x this number)"),
        ("microbatch_group_size_per_virtual_pipeline_stage", "`group_size` (`pipeline.group_size`)"),
        ("decoder_first_pipeline_num_layers", "the first number of `blocks: [...]`"),
        ("decoder_last_pipeline_num_layers", "the last number of `blocks: [...]`"),
        ("pipeline_model_parallel_layout", "`blocks: [...]`, the number of `t` in each stage: [below](#megatrons-layout)"),
        ("account_for_embedding_in_pipeline_split", f"{_NO_NEED}: without `blocks` stages are cut by the time of their ops"),
        ("account_for_loss_in_pipeline_split", f"{_NO_NEED}: without `blocks` stages are cut by the time of their ops"),
        ("context_parallel_size", "`split` with `axes: [sequence]`, or `whale.split(axis=\"sequence\")`"),
        ("expert_model_parallel_size", "`whale.split(axis=\"experts:0\")` around the experts ([page](mixture_of_experts.md))"),
        ("micro_batch_size", "`micro_batch_rows: N`"),
        ("global_batch_size", "rows of the batch: `engine.loader(dataset, global_batch_size=N)`; `--rows N` of `whale plan`"),
        ("rampup_batch_size", f"{_NO_NEED}: the number of rows may change from step to step"),
        ("use_distributed_optimizer", "`memory.zero: 1`"),
        ("overlap_grad_reduce", "always: a bucket is summed when its last gradient is there"),
        ("overlap_param_gather", "`communication.defer_weights`, on by default"),
        ("ddp_bucket_size", f"{_BUCKETS}; Megatron's counts elements"),
        ("tp_comm_overlap", "`communication.overlap`"),
        ("recompute_granularity", "`recompute: selective` (attention), or `full` (`recompute.policy`)"),
        ("recompute_method", "`recompute: blocks` keeps the inputs of blocks, as `uniform` with one layer does"),
        ("recompute_modules", "`recompute: {\"*.mlp\": recompute, \"*\": keep}`, by pattern of module names"),
        ("recompute_num_layers", "a share of a stage's blocks: `recompute: {0: 0.5, 1: 0.25}`; `auto`: no more than memory demands"),
        ("bf16", "`precision.dtype: bf16`; weights stay float32 unless the model says otherwise"),
        ("fp16", "`precision.dtype: fp16`"),
        ("loss_scale", _FIXED_SCALE),
        ("initial_loss_scale", "`precision.loss_scale`"),
        ("loss_scale_window", _GROWTH),
        ("hysteresis", _HYSTERESIS),
        ("min_loss_scale", _LEAST_SCALE),
        ("accumulate_allreduce_grads_in_fp32", "`gradient.dtype: float32`"),
        ("grad_reduce_in_bf16", "`gradient.sum_dtype: bf16`"),
        ("clip_grad", _CLIP),
        ("optimizer_cpu_offload", "`memory.offload: optimizer`"),
        ("cpu_offloading_num_layers", "`memory.offload: activations`, of all layers, or `memory.offload_as_needed`"),
        ("distributed_timeout_minutes", "`communication.timeout_seconds`"),
        ("use_tp_pp_dp_mapping", "`devices` of a block: any device may take any place"),
        ("async_save", "`engine.save(path, wait=False)`"),
        ("seed", "`runtime.seed`"),
    ),
}  # fmt: skip

FOREIGN_KEYS = tuple(ForeignKey(system, name, note) for system, keys in _KEYS.items() for name, note in keys)

_BY_NAME = {key.name: key for key in reversed(FOREIGN_KEYS)}

_SECTIONS = frozenset(key.name[:place] for key in FOREIGN_KEYS for place, letter in enumerate(key.name) if letter == ".")


def foreign_key(name: str) -> ForeignKey | None:
    """The key of another system that has a name, or all of whose section are the same here; of several systems the first."""
    return _BY_NAME.get(name) or _BY_NAME.get(f"{name.partition('.')[0]}.*")


def is_foreign_section(name: object) -> bool:
    """Whether a name is a section of another system's file."""
    return str(name) in _SECTIONS


def plain(note: str) -> str:
    """A note without links to pages."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", note)


def foreign_table(system: System) -> Iterator[str]:
    """The rows of a system's table, for the page: keys with the same note are in one."""
    by_note: dict[str, list[str]] = {}
    for key in FOREIGN_KEYS:
        if key.system == system:
            name = f"--{key.name.replace('_', '-')}" if system == "Megatron" else key.name
            by_note.setdefault(key.note, []).append(f"`{name}`")
    for note, names in by_note.items():
        yield f"| {', '.join(names)} | {note} |"
