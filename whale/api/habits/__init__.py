"""What scripts do with the model that they gave, which an engine does otherwise or cannot follow: told, or refused."""
