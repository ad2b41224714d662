"""The data of a training: loaders that read only the rows of their rank, and where they go on after a checkpoint."""
