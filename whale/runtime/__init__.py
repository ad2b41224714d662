"""Executes a plan: this rank's program, its actions, its gradients, its share of the weights."""
