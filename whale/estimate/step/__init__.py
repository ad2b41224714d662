"""A step of a plan: its devices, what travels between them, and what running its own schedule says of time and memory."""
