"""This rank's programs: the ops of a stage lowered for one device, in segments, halves and shards."""
