"""A step of a plan: its devices, messages and collectives, and the simulated time and memory."""
