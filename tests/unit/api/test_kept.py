"""Captures that are kept on disk: they serve the same model alone, and what slips is found before it is trained on."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
import whale.api.mode
import whale.capture.kept
from whale.capture import BatchStructure, capture
from whale.capture.comparing import difference
from whale.capture.exporting.near_values import NearValues
from whale.capture.kept import KeptCapture
from whale.errors import CaptureError

torch.set_num_threads(1)

BATCH = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)
options = SimpleNamespace(factor=1.0)
ALWAYS = {"runtime.retrace": "always"}


def enlarged(x: Tensor) -> Tensor:
    return x * options.factor


class Net(nn.Module):
    """Scales its layer by what it is given, in several ways."""

    def __init__(self, scale: float = 1.0, read: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale, self.read = nn.Linear(4, 2).double(), scale, read

    def forward(self, x: Tensor) -> Tensor:
        return enlarged(self.layer(x)) * self.scale * float(os.environ.get("WHALE_TEST_FACTOR", "1")) * self.read()


def square(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


@pytest.fixture(autouse=True)
def without_modules_of_other_tests(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files are younger than this process, and then nothing is kept."""
    made_here = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(made_here):
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "kept"
    monkeypatch.setenv("WHALE_RUNTIME_CAPTURE_CACHE", str(found))
    return found


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One for each capture."""
    made: list[str] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs["mode"])
        return capture(*args, **kwargs)

    monkeypatch.setattr(whale.api.mode, "capture", noted)
    return made


def started(model: nn.Module, **settings: Any) -> whale.Engine:
    return whale.parallelize(model, loss=square, optimizer=partial(torch.optim.SGD, lr=0.1), batch=BATCH, config=ALWAYS | settings)


def trained(model: nn.Module, steps: int = 3, **settings: Any) -> tuple[list[float], Tensor]:
    engine = started(model, **settings)
    losses = [float(engine.step(BATCH)) for _ in range(steps)]
    weight = engine.state_dict()["layer.weight"]  # type: ignore[index]
    engine.close()
    return losses, weight


def test_the_next_start_of_the_same_model_captures_after_its_first_step(folder: Path, traces: list[str]) -> None:
    losses, weight = trained(Net())
    assert len(traces) == 3 and len(list(folder.iterdir())) == 1
    engine = started(Net())
    assert len(traces) == 3
    again = [float(engine.step(BATCH))]
    assert len(traces) == 3
    again += [float(engine.step(BATCH)) for _ in range(2)]
    assert len(traces) == 5
    assert again == losses and torch.equal(engine.state_dict()["layer.weight"], weight)  # type: ignore[index]


@pytest.mark.parametrize("what", ["an attribute", "a global of a function that is called", "an environment variable", "frozen", "rows"])
def test_another_value_is_another_capture(what: str, folder: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    trained(Net())
    del traces[:]
    model = Net(2.0) if what == "an attribute" else Net()
    if what == "frozen":
        model.layer.bias.requires_grad_(False)
    if what == "rows":
        monkeypatch.setitem(globals(), "BATCH", BATCH[:6])
    monkeypatch.setattr(options, "factor", 2.0 if what.startswith("a global") else 1.0)
    monkeypatch.setenv("WHALE_TEST_FACTOR", "2" if what.startswith("an env") else "1")
    engine = started(model)
    assert traces == ["train"]
    expected = square(model(BATCH), BATCH)
    torch.testing.assert_close(engine.step(BATCH), expected.detach(), rtol=1e-12, atol=0)


SOURCE = "def twice(x):\n    return x * 2.0\n"


def loaded(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    os.utime(path, (1e9, 1e9))  # it was there when this process began, each time
    spec = importlib.util.spec_from_file_location("kept_source", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["kept_source"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_another_source_is_another_capture(folder: Path, traces: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, "kept_source", ModuleType("kept_source"))
    first, _ = trained(Net(read=partial(loaded(tmp_path / "source.py", SOURCE).twice, 1.0)), steps=1)
    del traces[:]
    second, _ = trained(Net(read=partial(loaded(tmp_path / "source.py", SOURCE.replace("2.0", "3.0")).twice, 1.0)), steps=1)
    assert traces == ["train"] and second == [pytest.approx(first[0] * 9 / 4)]


def test_a_stale_capture_is_found_where_the_model_is_traced_again(folder: Path, tmp_path: Path) -> None:
    class FromFile:
        def __call__(self) -> float:
            return float((tmp_path / "factor").read_text())

    def model() -> Net:
        return Net(read=FromFile())

    (tmp_path / "factor").write_text("1")
    trained(model())
    (tmp_path / "factor").write_text("2")
    engine = started(model())
    engine.step(BATCH)
    with pytest.raises(CaptureError, match=r"changed since the capture that was kept on disk .*2\.0, captured: 1\.0") as raised:
        engine.step(BATCH)
    assert "start again" in str(raised.value)
    losses, weight = trained(model())
    other, other_weight = trained(Net(2.0))
    assert losses == pytest.approx(other) and torch.allclose(weight, other_weight)


def test_a_file_that_is_damaged_is_a_miss_with_a_word(folder: Path, traces: list[str]) -> None:
    losses, _ = trained(Net())
    for cut in (100, -100):
        (path,) = folder.iterdir()
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.warns(UserWarning, match=r"cannot be read and is removed .*; the model is captured again"):
            assert trained(Net())[0] == losses


def test_a_file_that_others_can_write_is_not_read(folder: Path, traces: list[str]) -> None:
    trained(Net())
    (path,) = folder.iterdir()
    path.chmod(0o666)
    del traces[:]
    started(Net())
    assert traces == ["train"]


def test_of_a_model_that_keeps_what_has_no_contents_nothing_is_kept(folder: Path) -> None:
    numbers = itertools.repeat(1.0)
    losses, _ = trained(Net(read=lambda: next(numbers)))
    assert losses == trained(Net())[0] and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("settings", [{"runtime.capture_cache": "off"}, {"runtime.retrace": "off"}])
def test_none_is_kept_or_read(settings: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "runtime.capture_cache" in settings:
        monkeypatch.setenv("WHALE_RUNTIME_CAPTURE_CACHE", "off")
    trained(Net(), **settings)
    assert not folder.exists()


def test_the_folder_stays_small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(Net())
    (first,) = folder.iterdir()
    os.utime(first, (1e9, 1e9))
    monkeypatch.setattr(whale.capture.kept, "MOST_BYTES", int(1.5 * first.stat().st_size))
    (folder / "notes.txt").write_text("the user's")
    os.utime(folder / "notes.txt", (1e9, 1e9))
    started(Net(2.0))
    (second,) = set(folder.iterdir()) - {folder / "notes.txt"}
    assert second != first


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Kinds(nn.Module):
    """Ops whose nodes have arguments of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lstm, self.layer = nn.BatchNorm1d(4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)
        self.table = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lstm(self.norm(x).unsqueeze(1))[0].squeeze(1)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(y)
        y = nn.functional.dropout(y.float() + self.table + x.new_full((), x.shape[0]), 0.1, self.training)
        return Doubled.apply(y.masked_fill(y > 6.5, -torch.inf).softmax(-1)[:, 1:].contiguous(memory_format=torch.contiguous_format))  # type: ignore[no-any-return, no-untyped-call]


def test_all_kinds_of_ops_come_back(tmp_path: Path) -> None:
    model, batch = Kinds(), torch.randn(4, 4)
    graph, program = capture(model, batch, square)
    kept = KeptCapture.of(tmp_path, NearValues(model, square), square, BatchStructure.of(batch))
    assert kept is not None and kept.find() is None
    kept.keep(graph, program)
    found = kept.find()
    assert found is not None and found[0] == graph and str(found[1].graph) == str(program.graph)
    assert difference((graph, program), found) is None and found[1].tensors.keys() == program.tensors.keys()
    torch.manual_seed(1)
    expected = program.module()(*program.values(batch).values())
    torch.manual_seed(1)
    for one, other in zip(found[1].module()(*found[1].values(batch).values()), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_a_model_of_transformers_is_kept(folder: Path, traces: list[str]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    batch = {name: torch.arange(16).view(2, 8) for name in ("input_ids", "labels")}

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8, bos_token_id=1, eos_token_id=1))
        return float(whale.parallelize(model, batch=batch).evaluate(batch))

    first = loss(0)
    assert traces == ["train", "eval"]
    assert loss(0) == first and loss(1) != first
    assert traces == ["train", "eval", "eval", "eval"]
