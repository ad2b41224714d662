"""The rules of operators: one table, the families of rules that need code, and the rules that users add."""

from whale.axes.rules.registry import find_rule, register_rule
from whale.axes.rules.table import FAMILIES, TABLE, Rule

__all__ = ["FAMILIES", "TABLE", "Rule", "find_rule", "register_rule"]
