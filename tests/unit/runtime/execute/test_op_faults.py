"""A fault that a GPU tells late is laid to no op."""

from __future__ import annotations

import pytest
import torch

from whale.errors import OpFault
from whale.ir.graph import ModelGraph
from whale.runtime.execute.op_faults import named_ops


def test_what_a_device_tells_late() -> None:
    told = r"on rows 4 to 7 of the batch, or before: CUDA error: device-side assert"
    with pytest.raises(OpFault, match=told) as caught, named_ops(ModelGraph((), (), 4), 4, 8):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\nmore")
    assert caught.value.where is None and "CUDA_LAUNCH_BLOCKING=1" in str(caught.value.hint)
