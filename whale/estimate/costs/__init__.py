"""What one op, one message and one step of the optimizer cost, in closed forms."""
