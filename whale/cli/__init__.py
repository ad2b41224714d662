"""The command ``whale``: capture, plan, explain, schedule and run."""

from whale.cli.main import main

__all__ = ["main"]
