"""Executes a plan: this rank's programs, actions, gradients and parts of the weights."""
