"""What ops, stages and messages cost: the cost model applied to parts of one graph."""
