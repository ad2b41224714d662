"""The running of a step: actions, messages, the agreement on a batch, the loss."""
