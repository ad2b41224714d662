"""Random shardings of random tensors, and devices that are numpy arrays, which carry out steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Literal

import numpy as np
from hypothesis import strategies as st

from whale.axes import Concatenation, Dimension
from whale.sharding import IndexSpace, Region, Sharding, Step
from whale.sharding.index_sets import Runs

SIZES = {"batch": 5, "heads": 4, "width": 2, "sequence": 3}
TENSORS: tuple[tuple[Dimension, ...], ...] = (
    (("batch",), ("heads",)),
    (("batch", "sequence"), ("heads", "width")),
    (("batch",), (Concatenation((("width", "heads"), ("heads",))),)),  # heads inside a fused projection, in pieces of unlike sizes
    (("heads", "sequence", "batch"),),
)
Arrays = dict[int, "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"]

spaces = st.sampled_from(TENSORS).map(lambda dimensions: IndexSpace(dimensions, SIZES))


@st.composite
def groups(draw: st.DrawFn, axes: Sequence[str]) -> list[Region]:
    """Regions that together make the whole: uneven shards of each axis, some of them empty, each on one or two devices."""
    grids = []
    for axis in axes:
        ends = [0, *sorted(draw(st.lists(st.integers(0, SIZES[axis]), max_size=2))), SIZES[axis]]
        grids.append([(axis, *interval) for interval in pairwise(ends)])
    regions = [Region(box) for box in product(*grids)]
    return draw(st.permutations([region for region in regions for _ in range(draw(st.integers(1, 2)))]))


@st.composite
def shardings(draw: st.DrawFn, *, terms: Literal["none", "groups", "any"] = "any") -> Sharding:
    """One or two groups of devices that hold the same tensor, in shards of their own: as copies, or as terms of a sum."""
    axes = draw(st.sampled_from([(), ("batch",), ("heads",), ("batch", "heads")]))
    parts = draw(st.lists(groups(axes), min_size=1, max_size=2))
    regions = [region for group in parts for region in group]
    mesh = draw(st.permutations(range(len(regions) + 2)))[: len(regions)]
    by_group = [number for number, group in enumerate(parts) for _ in group]
    known: dict[str, list[Sequence[int]]] = {"none": [()], "groups": [(), by_group], "any": [(), by_group, range(len(regions))]}
    return Sharding(tuple(mesh), tuple(regions), tuple(draw(st.sampled_from(known[terms]))))


def at(runs: Sequence[Runs]) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], ...]:
    """Positions per dimension as what numpy indexes by."""
    return np.ix_(*([place for start, stop in own for place in range(start, stop)] for own in runs))


def scatter(sharding: Sharding, space: IndexSpace, seed: int) -> Arrays:
    """What each device of a sharding holds of random terms."""
    generator = np.random.default_rng(seed)
    terms = {term: generator.integers(-9, 9, space.shape(Region())).astype(float) for term in sorted(set(sharding.own_terms))}
    held = zip(sharding.mesh, sharding.regions, sharding.own_terms, strict=True)
    return {device: terms[term][at(space.positions(region))] for device, region, term in held}


def value(sharding: Sharding, space: IndexSpace, arrays: Arrays) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The whole tensor that devices hold; copies of one term must agree."""
    total = np.zeros(space.shape(Region()))
    for term in set(sharding.own_terms):
        own = np.full_like(total, np.nan)
        for device, region, other in zip(sharding.mesh, sharding.regions, sharding.own_terms, strict=True):
            if other == term:
                place = at(space.positions(region))
                assert arrays[device].shape == own[place].shape
                known = ~np.isnan(own[place])
                assert np.array_equal(own[place][known], arrays[device][known]), "copies are equal"
                own[place] = arrays[device]
        total += np.nan_to_num(own)
    return total


def carry_out(step: Step, space: IndexSpace, arrays: Arrays) -> Arrays:
    """What a step makes of what devices hold: of an all-reduce, the sums alone."""
    before: Mapping[int, Region] = dict(step.before)
    made = {device: np.zeros(space.shape(region)) for device, region in step.after}
    for move in step.moves:
        held = arrays[move.source][at(space.positions(move.region, before[move.source]))]
        made[move.target][at(space.positions(move.region, dict(step.after)[move.target]))] += held
    return made


def run(steps: Sequence[Step], source: Sharding, target: Sharding, space: IndexSpace, arrays: Arrays) -> Arrays:
    """What the devices of a target hold after all steps."""
    held = dict(arrays)
    for step in steps:
        if step.kind == "all-reduce":
            region = step.before[0][1]
            place = {device: at(space.positions(region, source.held[device])) for device, _ in step.before}
            summed = carry_out(step, space, {device: held[device][place[device]] for device, _ in step.before})
            for device, made in summed.items():
                held[device] = held[device].copy()
                held[device][place[device]] = made
        else:
            held.update(carry_out(step, space, held))
    zeros = {device: np.zeros(space.shape(region)) for device, region in target.held.items()}
    return {device: held.get(device, zeros[device]) for device in target.mesh}
