"""State from step to step: who holds which part, gradient sums, optimizer state, running statistics."""
