"""What the graph itself requires of any plan: which ops stay together, what a stage consists of, what crosses."""
