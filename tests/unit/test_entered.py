"""How much of the package a small training goes through: files whose functions run, and modules that are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from tests.unit.test_layers import ROOT

# Two linear layers on one device. These may only shrink.
PARALLELIZE = 109
"""Files that `parallelize` enters."""
LATER_STEP = 36
"""Files that a step enters when all is there."""
IMPORTED = 314
"""Modules that are there then."""

PROGRAM = """
import json, sys, threading
from functools import partial
import torch
from torch import nn
import whale.api

ROOT = sys.argv[1]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.first(x))

def entered(call):
    found = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        return call(), found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)

def loss(output, batch):
    return (output - batch["y"]).square().mean()

batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 4)}
optimizer = partial(torch.optim.SGD, lr=0.1)
engine, at_first = entered(lambda: whale.parallelize(Net(), loss=loss, optimizer=optimizer, batch=batch))
steps = [entered(lambda: engine.step(batch))[1] for _ in range(4)]  # the model is traced again before the second and the third
imported = [name for name in sys.modules if name.partition(".")[0] == "whale"]
print(json.dumps({"parallelize": sorted(at_first), "step": sorted(steps[-1]), "imported": sorted(imported)}))
"""


@cache
def found() -> dict[str, list[str]]:
    package = f"{ROOT / 'whale'}/"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("WHALE_")}  # each of these is looked at as a setting
    done = subprocess.run([sys.executable, "-c", PROGRAM, package], cwd=ROOT, env=plain, capture_output=True, text=True, check=True)
    return {name: [each.removeprefix(package) for each in listed] for name, listed in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "most"), [("parallelize", PARALLELIZE), ("step", LATER_STEP), ("imported", IMPORTED)])
def test_a_small_training_goes_through_few_files(what: str, most: int) -> None:
    listed = found()[what]
    assert listed and len(listed) <= most, f"{len(listed)} files, at most {most}: {' '.join(listed)}"
