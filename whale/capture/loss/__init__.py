"""The loss as terms of (sum, weight)."""
