"""The rows of a global batch that one rank needs, has in hand, and shares with others."""
