"""``whale checkpoint``: shown, verified, and weights out to safetensors files and back, whole or in shards."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

import whale
from whale.cli import main

torch.set_num_threads(1)
BATCH = {"tokens": torch.arange(12).reshape(6, 2)}
TIE, LEFT_OUT = "head.weight", "scale"


class Model(nn.Module):
    """With a tied weight, running statistics and a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(12, 4), nn.BatchNorm1d(8), nn.Linear(4, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer(LEFT_OUT, torch.full((8,), 2.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens).flatten(1)) * self.scale
        return self.head(hidden.unflatten(1, (2, 4)))


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["tokens"].flatten())


def make_engine(seed: int) -> whale.Engine:
    torch.manual_seed(seed)
    engine = whale.parallelize(Model(), loss=loss, optimizer=partial(torch.optim.Adam, lr=0.1), batch=BATCH)
    engine.step(BATCH)
    return engine


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and the state dict of its model."""
    path, engine = tmp_path_factory.mktemp("saved") / "c", make_engine(0)
    engine.save(path, extra={"run": "first", "best": torch.ones(2)}, score=engine.evaluate(BATCH))
    state = engine.state_dict()
    assert state is not None and TIE in state and LEFT_OUT not in state
    return path, state


def test_what_it_holds_is_shown(trained: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    path, state = trained
    assert main(["checkpoint", "show", str(path)]) == 0
    printed = capsys.readouterr().out
    for line in (
        "step             1",
        "optimizer        Adam",
        "scheduler        -",
        "extra            run, best",
        "1 replica x 1 stage; ",
    ):
        assert line in printed
    assert main(["checkpoint", "show", str(path), "--verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tensors"]["embedding.weight"] == {"dtype": "float32", "shape": [12, 4], "bytes": 192}
    assert found["tensors"].keys() == state.keys() - {TIE} | {LEFT_OUT}
    assert found["model_bytes"] == sum(each["bytes"] for each in found["tensors"].values()) and found["score"] > 0
    assert found["verified_pieces"] > len(found["tensors"]) and found["other_bytes"] > 2 * 192


def test_damage_is_shown(trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(1)
    engine.save(tmp_path / "c")
    file = tmp_path / "c" / "rank_0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["checkpoint", "show", str(tmp_path / "c")]) == 0
    assert main(["checkpoint", "show", str(tmp_path / "c"), "--verify"]) == 1
    assert "is damaged (" in capsys.readouterr().err


@pytest.mark.parametrize("shard_bytes", ["5 GB", "200 B", "1"])
def test_weights_go_out_and_come_back(trained: tuple[Path, dict[str, Any]], tmp_path: Path, shard_bytes: str) -> None:
    path, state = trained
    out = tmp_path / "out"
    assert main(["checkpoint", "export", str(path), str(out), "--shard-bytes", shard_bytes]) == 0
    names = {entry.name for entry in out.iterdir()}
    files = sorted(name for name in names if name.endswith(".safetensors"))
    found = {key: value for name in files for key, value in load_file(out / name).items()}
    assert found.keys() == state.keys() - {TIE} and all(torch.equal(value, state[key]) for key, value in found.items())
    index = out / "model.safetensors.index.json"
    if shard_bytes == "5 GB":
        assert names == {"model.safetensors"}
        model = Model()
        load_model(model, out / "model.safetensors")
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    else:
        assert names == {*files, index.name} and len(files) == {"200 B": 2, "1": len(found)}[shard_bytes]
        places = json.loads(index.read_text())["weight_map"]
        assert {key: places[key] for name in files for key in load_file(out / name)} == places

    assert main(["checkpoint", "import", str(index if index.exists() else out), str(tmp_path / "weights")]) == 0
    assert not dist.is_initialized()
    loaded, given = make_engine(2), make_engine(2)
    assert loaded.load(tmp_path / "weights") is None
    given.load_state_dict(state)
    assert loaded.step_number == 1 and loaded.step(BATCH) == given.step(BATCH)
    assert all(torch.equal(value, given.tensors[name]) for name, value in loaded.tensors.items())


def test_an_imported_file_may_have_tied_names_of_equal_values(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, state = make_engine(3), trained[1]
    before = engine.state_dict()
    changes = {
        "both": state | {TIE: state[TIE].clone()},
        "last": {key: value for key, value in state.items() if key != "embedding.weight"},
        "compiled": {f"_orig_mod.{key}": value for key, value in state.items() if key != TIE},
        "other": state | {TIE: state[TIE] + 1},
        "lacking": {key: value for key, value in state.items() if key not in ("norm.bias", TIE)},
    }
    for name, tensors in changes.items():
        save_file(dict(tensors), tmp_path / f"{name}.safetensors")
        assert main(["checkpoint", "import", str(tmp_path / f"{name}.safetensors"), str(tmp_path / name)]) == 0
    for name, message in (("other", "head.weight and embedding.weight are one tensor"), ("lacking", "norm.bias is not in the checkpoint")):
        with pytest.raises(whale.CheckpointError, match=message):
            engine.load(tmp_path / name)
        now = engine.state_dict()
        assert before is not None and now is not None and all(torch.equal(value, now[key]) for key, value in before.items())
    for name in ("both", "last", "compiled"):
        engine = make_engine(4)
        engine.load(tmp_path / name)
        now = engine.state_dict()
        assert now is not None and all(torch.equal(value, now[key]) for key, value in state.items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "nowhere"], "there is no such folder"),
        (["export", "{path}", "{path}"], "weights are written to a new folder"),
        (["export", "{path}", "out", "--shard-bytes", "many"], "--shard-bytes is not a size such as 5 GB"),
        (["import", "{path}/complete.json", "c"], "is not an index of safetensors files: KeyError"),
        (["import", "{path}/none.json", "c"], "is not an index of safetensors files: FileNotFoundError"),
        (["import", "up.json", "c"], "'../model.safetensors' is not in its folder"),
        (["import", "{path}", "c"], "model.safetensors cannot be read"),
        (["import", "short.safetensors", "c"], "short.safetensors cannot be read"),
    ],
)
def test_what_cannot_be_done_is_an_error(
    trained: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("up.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    Path("short.safetensors").write_bytes(b"\1\2")
    assert main(["checkpoint", *(word.format(path=trained[0]) for word in words)]) == 1
    assert message in capsys.readouterr().err
    assert {entry.name for entry in tmp_path.iterdir()} == {"up.json", "short.safetensors"}
