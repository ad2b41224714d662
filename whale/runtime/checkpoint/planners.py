"""Planners of `torch.distributed.checkpoint` for tensors that ranks hold in parts: which rectangles are written and read.

written     each rectangle that a rank answers for is a chunk of the whole tensor, so any reader finds it by position
read        each stored chunk that overlaps with what a rank holds, once:

            stored chunk    . . a a b b c c . .      where the rank holds one run of it, straight into its place,
            held                a a     c c          else through memory for what lies between the first and the last
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType

from whale.runtime.checkpoint.boxes import Box, Share, bounding_box, boxes
from whale.sharding.index_sets import Runs


class ShareSavePlanner(DefaultSavePlanner):
    """Writes the rectangles that this rank answers for.

    Args:
        shares: by key, of those entries that are parts of a tensor; the others are written as they are.
    """

    def __init__(self, shares: Mapping[str, Share]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        self._shares = shares
        self._boxes: dict[MetadataIndex, Box] = {}

    def create_local_plan(self) -> SavePlan:
        """What this rank writes."""
        whole = {key: value for key, value in self.state_dict.items() if key not in self._shares}
        items = [item for key, share in self._shares.items() for item in self._write_items(key, share)]
        self.plan = SavePlan([*create_default_local_save_plan(whole, self.is_coordinator).items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> object:
        """The value that an item of the plan stands for."""
        box = self._boxes.get(index)
        if box is None:
            return super().lookup_object(index)
        return self._shares[index.fqn].local(box).of(self.state_dict[index.fqn])

    def _write_items(self, key: str, share: Share) -> Iterator[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.state_dict[key])
        for box in share.written_boxes():
            start = torch.Size(box.start)
            index = MetadataIndex(key, start)
            self._boxes[index] = box
            chunk = ChunkStorageMetadata(start, torch.Size(box.shape))
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, torch.Size(share.shape)))


class ShareLoadPlanner(DefaultLoadPlanner):
    """Reads what this rank holds, out of chunks of any form.

    Args:
        shares: by key, of those entries that are parts of a tensor; the others are read whole.
    """

    def __init__(self, shares: Mapping[str, Share]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shares = shares

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads."""
        assert self.metadata is not None
        whole = {key: value for key, value in self.state_dict.items() if key not in self._shares}
        items = create_default_local_load_plan(whole, self.metadata).items
        for key, share in self._shares.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            items += (item for chunk in stored.chunks for item in _read_items(key, share, chunk))
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where an item is read to."""
        share = self._shares.get(read_item.dest_index.fqn)
        if share is None:
            target: Tensor = super().resolve_tensor(read_item)
            return target
        held: Tensor = self.state_dict[read_item.dest_index.fqn]
        if _is_box(_wanted(share, read_item)):
            return share.local(_box(read_item)).of(held)
        return torch.empty(read_item.lengths, dtype=held.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Takes the runs that this rank holds out of what was read."""
        share = self._shares.get(read_item.dest_index.fqn)
        if share is None or _is_box(wanted := _wanted(share, read_item)):
            return
        held: Tensor = self.state_dict[read_item.dest_index.fqn]
        origin = _box(read_item).start
        for box in boxes(wanted):
            share.local(box).of(held).copy_(box.relative_to(origin).of(tensor))


def _read_items(key: str, share: Share, chunk: ChunkStorageMetadata) -> Iterator[ReadItem]:
    """The part of a stored chunk that is needed, if any, with what lies between."""
    stop = tuple(start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    wanted = share.overlap(Box(tuple(chunk.offsets), stop))
    if wanted is None:
        return
    box = bounding_box(wanted)
    yield ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(key, torch.Size(box.start)),
        dest_offsets=torch.Size(share.local(box).start),
        storage_index=MetadataIndex(key, chunk.offsets),
        storage_offsets=torch.Size(box.relative_to(chunk.offsets).start),
        lengths=torch.Size(box.shape),
    )


def _box(item: ReadItem) -> Box:
    start = item.dest_index.offset
    assert start is not None
    return Box(tuple(start), tuple(first + size for first, size in zip(start, item.lengths, strict=True)))


def _wanted(share: Share, item: ReadItem) -> tuple[Runs, ...]:
    wanted = share.overlap(_box(item))
    assert wanted is not None
    return wanted


def _is_box(positions: tuple[Runs, ...]) -> bool:
    return all(len(runs) == 1 for runs in positions)
