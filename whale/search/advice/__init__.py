"""What each group of devices adds, and what more or faster ones would bring."""
