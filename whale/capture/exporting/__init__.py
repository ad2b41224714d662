"""The export: torch traces the user's code; side effects that a graph would lose are tracked or refused."""
