"""Plans that are written down whole: from a plan to its text, and back."""

from whale.planning.written.state import state_plan
from whale.planning.written.write import write_plan

__all__ = ["state_plan", "write_plan"]
