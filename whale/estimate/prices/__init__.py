"""The costs applied to stages: what a part of the graph costs on a device, split or not, each question answered once."""
