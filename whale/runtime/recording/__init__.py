"""The timeline of a real step: what each rank recorded, on a common clock, combined."""
