"""Prices whole model replicas: one on its devices, all of a placement, the end of the step."""
