"""How whole units (rows, heads, columns) are divided by weights: the one rule that plan and runtime share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def divide(total: int, weights: Sequence[float], minimum: int | Sequence[int] = 0) -> tuple[int, ...]:
    """Divides `total` units in proportion to `weights`, by largest remainder, earlier parts first on ties.

    ``divide(8, (5, 3)) == (5, 3)``: weights that sum to the total come back unchanged.

    Args:
        total: units.
        weights: one non-negative weight per part, not all zero.
        minimum: least units of every part with a positive weight: one number for all, or one for each.

    Raises:
        ValueError: the total is less than the sum of the minimums.
    """
    takers = [index for index, weight in enumerate(weights) if weight > 0]
    least = [minimum] * len(weights) if isinstance(minimum, int) else minimum
    if total < sum(least[index] for index in takers):
        raise ValueError(f"{total} cannot be divided over {len(takers)} parts of at least {minimum}")
    whole = sum(weights)
    quotas = [total * weight / whole for weight in weights]
    sizes = [int(quota + 1e-9) for quota in quotas]
    order = sorted(takers, key=lambda index: (sizes[index] - quotas[index], index))
    for index in order[: total - sum(sizes)]:
        sizes[index] += 1
    for index in takers:
        while sizes[index] < least[index]:
            largest = max(takers, key=lambda other: (sizes[other] - least[other], -other))
            sizes[largest] -= 1
            sizes[index] += 1
    return tuple(sizes)


def divide_evenly(total: int, num_parts: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, larger ones first: ``divide_evenly(7, 3) == (3, 2, 2)``."""
    base, extra = divmod(total, num_parts)
    return tuple(base + (index < extra) for index in range(num_parts))


def intervals(sizes: Sequence[int], start: int = 0) -> tuple[tuple[int, int], ...]:
    """Half-open intervals of consecutive parts: ``intervals((5, 3)) == ((0, 5), (5, 8))``."""
    ends = list(accumulate(sizes, initial=start))
    return tuple(pairwise(ends))
