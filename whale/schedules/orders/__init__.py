"""The orders of computations, one pure function per file."""
