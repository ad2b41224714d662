"""Runs a step: actions, messages, the agreement on the batch, the loss."""
