"""What is kept: parameters with their states, activations for backward, and what an op works on."""
