"""Closed forms of the cost of one op, one message and one optimizer step."""
