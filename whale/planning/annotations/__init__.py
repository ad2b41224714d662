"""Reads the user's scopes: TaskGraphs, their devices, their nesting, and which run together."""
