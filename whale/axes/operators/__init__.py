"""Operators: one entry for each says all that Whale knows of it; a new one is an entry in the file of its family."""

from whale.axes.operators.entry import Operator, Rows, Rule
from whale.axes.operators.registry import (
    FAMILIES,
    OPERATORS,
    added_operand,
    entry_of,
    entry_of_call,
    gathered_operands,
    is_pointwise,
    operator_of,
    register_rule,
)

__all__ = [
    "FAMILIES", "OPERATORS", "Operator", "Rows", "Rule", "added_operand", "entry_of", "entry_of_call", "gathered_operands",
    "is_pointwise", "operator_of", "register_rule",
]  # fmt: skip
