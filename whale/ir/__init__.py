"""The values that flow between the parts: ModelGraph, Cluster, Layout, Plan, Schedule, Timeline."""
