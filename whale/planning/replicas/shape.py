"""What a block of ``replicas:`` is, wherever it lies: its settings, its scopes and its pipeline."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from whale.config import Config, ReplicaBlock
from whale.errors import ConfigError
from whale.ir.graph import ModelGraph
from whale.planning.annotations.taskgraphs import Annotations, read_scopes
from whale.planning.pipeline.scheduling import AskedAxes, PipelineShape, Split, shape_pipeline


@dataclass(frozen=True)
class Shape:
    """What a replica is, wherever it lies.

    Attributes:
        config: the settings, with the block's own.
        annotations: the scopes on its devices; None without scopes.
        pipeline: its pipeline.
    """

    config: Config
    annotations: Annotations | None
    pipeline: PipelineShape


def shape_of(graph: ModelGraph, config: Config, asked: ReplicaBlock, stated: int | None, num_free: int, name: str) -> Shape:
    """The shape of a block.

    Args:
        stated: devices that it states; None where it takes those of its stages.
        num_free: devices that it may take then.
        name: of the block in messages.

    Raises:
        ConfigError: the block does not fit the scopes, its devices or itself.
        AnnotationError: scopes that cannot be honoured on its devices.
    """
    own = config.with_values({f"pipeline.{key}": value for key, value in asked.pipeline})
    if asked.recompute is not None:
        own = own.with_values({"recompute.policy": asked.recompute})
    annotations = read_scopes(graph, own, stated or num_free)
    num_stages = own.pipeline.num_stages or 1
    if annotations is None and stated is None and num_stages > num_free:
        raise ConfigError(
            f"each stage of a replica takes a device ({name}, num_stages: {num_stages}, devices left: {num_free})",
            where=asked.at("num_stages"),
            hint=f"devices: {num_free} lets consecutive stages share them" if num_free else None,
        )
    width = asked.split if annotations is None and asked.split is not None else 1
    pipeline = shape_pipeline(own, annotations, max((stated or num_free) // width, 1))
    if annotations is None and asked.split is not None:
        devices = (asked.split,) * pipeline.num_ranks
        pipeline = dataclasses.replace(pipeline, devices=devices, splits=(Split(asked.split),) * pipeline.num_stages)
    elif annotations is not None:
        _check_repeats(asked, annotations, name)
    if asked.axes is not None:
        if not pipeline.splits:
            raise ConfigError(
                f"axes are cut in stages that are split ({name} splits none)", where=asked.at("axes"), hint="split: 2, for instance"
            )
        axes = AskedAxes(asked.axes, asked.more_axes)
        pipeline = dataclasses.replace(pipeline, splits=tuple(dataclasses.replace(split, asked=axes) for split in pipeline.splits))
    _check_devices(asked, pipeline, stated, name)
    return Shape(own, annotations, pipeline)


def _check_repeats(asked: ReplicaBlock, annotations: Annotations, name: str) -> None:
    """Scopes say what is split; a block may repeat it."""
    widths = sorted(set(annotations.widths))
    if asked.split is not None and asked.split not in widths:
        raise ConfigError(
            f"the scopes say what is split ({name}, split: {asked.split}, scopes: {', '.join(map(str, widths))})",
            where=annotations.scopes[0].where,
            hint="remove the key or the scopes",
        )


def _check_devices(asked: ReplicaBlock, pipeline: PipelineShape, stated: int | None, name: str) -> None:
    wanted = pipeline.num_devices
    if stated is not None and stated != wanted:
        each = " + ".join(map(str, pipeline.devices)) if pipeline.num_ranks > 1 else str(wanted)
        raise ConfigError(
            f"a replica has the devices that its stages take ({name}, devices: {stated}, stages: {each})",
            where=asked.at("devices"),
            hint="num_stages and split of the block say how many its stages take",
        )
    widths = tuple(map(len, asked.placed or ()))
    if widths and widths != pipeline.devices:
        raise ConfigError(
            f"a replica has the devices that its stages take ({name}, devices: {' + '.join(map(str, widths))}, "
            f"stages: {' + '.join(map(str, pipeline.devices))})",
            where=asked.at("devices"),
        )
