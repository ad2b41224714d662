"""Memory: parameters with their states, activations kept for backward, and the working set of an op."""
