"""Scopes as the user writes them, and the capture of model and loss as one graph."""

from whale.capture.batch import BatchStructure, Leaf
from whale.capture.capture import capture
from whale.capture.program import OutputStructure, Program
from whale.capture.scopes import Annotation, replicate, set_default_strategy, split, tag

__all__ = [
    "Annotation",
    "BatchStructure",
    "Leaf",
    "OutputStructure",
    "Program",
    "capture",
    "replicate",
    "set_default_strategy",
    "split",
    "tag",
]
