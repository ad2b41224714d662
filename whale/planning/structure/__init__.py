"""What the graph itself demands of any plan: what stays together, what a stage consists of, what crosses."""
