"""The plan in words: every choice with its cost, its bound and its runner-up."""
