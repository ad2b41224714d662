"""Cuts a model without scopes into stages, by the cost of every piece on every device type."""
