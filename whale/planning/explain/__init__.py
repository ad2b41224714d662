"""Explains the plan: every choice with its cost, bound and runner-up."""
