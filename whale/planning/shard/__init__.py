"""Split stages: along which axis each op works, in which sizes, and when what is exchanged may hide."""
