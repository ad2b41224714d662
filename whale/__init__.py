"""Whale trains PyTorch models on the GPUs people really have."""
