"""The state that a training starts from and is asked for: weights, the optimizer over them, and their names."""
