"""Split stages: along which axis each op works, in which sizes, and whether exchanges are overlapped."""
