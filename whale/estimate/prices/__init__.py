"""Prices: the costs of a part of the graph on a device, split or not, cached."""
