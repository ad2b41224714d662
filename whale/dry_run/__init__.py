"""What a plan's ranks keep in memory, found by running them on tensors without contents."""

from whale.dry_run.dry_run import DryRun, dry_run
from whale.dry_run.rank import LiveBytes, Peak

__all__ = ["DryRun", "LiveBytes", "Peak", "dry_run"]
