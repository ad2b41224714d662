"""The rule of attention."""

from __future__ import annotations

from whale.axes.outcome import Reading, argument
from whale.ir.graph import Op


def attention(op: Op, reading: Reading) -> str:
    """``scaled_dot_product_attention``: heads are independent, and so are queries unless a causal mask counts them from 0."""
    sequence = "sequence!" if argument(op, 5, "is_causal", False) is True else "sequence"
    return (
        f"query[... heads*group {sequence} head_dim!] key[... heads memory! head_dim!] value[... heads memory! value_dim] "
        f"attn_mask[... heads*group {sequence} memory!] -> [... heads*group {sequence} value_dim]"
    )
