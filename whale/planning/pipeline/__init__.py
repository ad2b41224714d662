"""The shape of the pipeline: schedule, devices, stages, recomputation, rows."""
