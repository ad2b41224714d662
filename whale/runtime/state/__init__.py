"""What lives from step to step: who holds which part, gradients summed, optimizer state, running statistics."""
