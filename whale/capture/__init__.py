"""Scopes as the user writes them, and the capture of model and loss as one graph."""

from whale.capture.batch import AS_LARGE_AS_THE_BATCH, BatchDims, BatchStructure, Leaf, check_batch_dims, plain, tensors_of
from whale.capture.capture import capture
from whale.capture.program import CapturedProgram, OutputStructure
from whale.capture.scopes import Annotation, replicate, set_default_strategy, split, tag

__all__ = [
    "AS_LARGE_AS_THE_BATCH", "Annotation", "BatchDims", "BatchStructure", "CapturedProgram", "Leaf", "OutputStructure", "capture",
    "check_batch_dims", "plain", "replicate", "set_default_strategy", "split", "tag", "tensors_of",
]  # fmt: skip
