"""Whole tensors and parts of them: initial weights, gathered state dicts and predictions."""
