"""The sizes of matrix products: a product that is narrow in any of them does not fill the device.

                width                     of a weight      width: what it makes of each row   height: all rows
            +----------+                  of two values    width, height: the last two dimensions of the result
     depth  |          |                  everything else  infinite: not a product
            +----------+
+--------+  +----------+
|        |  |          |  height
+--------+  +----------+
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from whale.ir.graph import ModelGraph, Op, TensorSpec


@dataclass(frozen=True, slots=True)
class ProductSizes:
    """Sizes of one product, at one row of the batch where they grow with them.

    Attributes:
        depth: numbers that are summed up for each of the result.
        width, height: of the result; `height` at the example's rows.
        height_grows: whether the height is in proportion to the rows.
        weight: the op that brings the weight; None where two values are multiplied.
    """

    depth: float = inf
    width: float = inf
    height: float = inf
    height_grows: bool = False
    weight: str | None = None


NO_PRODUCT = ProductSizes()


def product_sizes(graph: ModelGraph, op: Op) -> ProductSizes:
    """The sizes of what an op multiplies: of one whose arithmetic is much more than what it reads and writes."""
    if not op.outputs or not op.outputs[0].shape:
        return NO_PRODUCT
    read = [graph.by_name[name] for name in op.inputs]
    made = op.outputs[0]
    touched = made.num_elements + sum(spec.num_elements for source in read for spec in source.outputs[:1])
    if op.forward_flops <= 2 * touched:
        return NO_PRODUCT
    depth = op.forward_flops / (2 * made.num_elements)
    weight = next((source for source in read if source.kind == "parameter" and len(source.outputs[0].shape) > 1), None)
    if weight is None:
        return _of_values(made, depth)
    width = max(1.0, weight.outputs[0].num_elements / depth)
    return ProductSizes(depth, width, made.num_elements / width, made.has_rows, weight.name)


def _of_values(made: TensorSpec, depth: float) -> ProductSizes:
    height, grows = (made.shape[-2], made.row_factors[-2] > 0) if len(made.shape) > 1 else (1, False)
    return ProductSizes(depth, float(made.shape[-1]), float(height), grows)
