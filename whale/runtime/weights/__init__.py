"""Whole tensors and parts of them: initial weights made, state dicts and predictions gathered."""
