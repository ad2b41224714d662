"""The event engine, and the run of a schedule alone over given durations."""
