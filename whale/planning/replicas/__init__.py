"""Whole model replicas, priced: one on its devices, all of a placement, the end of the step."""
