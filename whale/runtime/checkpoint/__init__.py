"""Checkpoints: each part written once, read under any plan."""
