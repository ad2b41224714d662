"""A step as it was: what each rank saw, by clocks that are made to agree, put together."""
