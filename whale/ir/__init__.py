"""The values that flow between the parts: ModelGraph, Cluster, Plan, Schedule, Timeline."""
