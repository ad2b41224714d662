"""What WhaleTrainer refuses when it is made, and what a captured compute_loss may do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from whale.errors import CaptureError, ConfigError
from whale.integrations.transformers import Computed, WhaleTrainer


@pytest.mark.parametrize(("name", "value"), [("auto_find_batch_size", True), ("torch_compile", True), ("use_liger_kernel", True)])
def test_an_argument_that_cannot_be_served_is_an_error_that_names_it(tmp_path: Path, name: str, value: Any) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    setattr(arguments, name, value)
    with pytest.raises(ConfigError, match=f"TrainingArguments.{name}"):
        WhaleTrainer(nn.Linear(2, 2), arguments)


def test_an_optimizer_that_is_made_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = partial(WhaleTrainer, model, transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    with pytest.raises(ConfigError, match="cannot use an optimizer that is already made"):
        make(optimizers=(optimizer, None))


def test_compute_loss_gets_the_output_that_is_there() -> None:
    model, x, output = nn.Linear(2, 2), torch.zeros(1, 2), torch.ones(1, 2)
    computed = Computed(model, output, {"x": x})
    assert computed(x=x, num_items_in_batch=3) is output
    assert computed.weight is model.weight
    with pytest.raises(CaptureError, match="compute_loss passes x to the model"):
        computed(x=x + 1)
