"""The event engine, and the simulation of a bare schedule with given durations."""
