"""The loss taken apart: what it is a sum of, and by what it is weighed."""
