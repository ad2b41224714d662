"""An index whose checksums are right and whose content is not: one error before anything is touched, or the values that were saved."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.api.test_guards import BATCH, parallelize
from tests.unit.runtime.checkpoint.test_checkpoint import EXTRAS, OPTIMIZER, read, tensors, write
from whale.errors import CheckpointError
from whale.runtime.checkpoint.boxes import Box, Share
from whale.runtime.checkpoint.contents import _are_tiles

QUARTERS = Share((4, 5), (((0, 4),), ((0, 5),)), tuple((((a, a + 2),), (b,)) for a in (0, 2) for b in ((0, 2), (2, 5))))
CUT = torch.arange(20.0).view(4, 5)
JUNK: tuple[Any, ...] = (
    None,
    -1,
    0,
    1,
    10**9,
    2**70,
    1.5,
    True,
    "many",
    "../x",
    "float64",
    [],
    [0],
    {},
    {"tensor": "gone", "is_cuda": False},
    {"numpy": ["O", 1]},
)


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Changes the index of a checkpoint and all that proves it."""
    index, marker = json.loads((path / "index.json").read_text()), json.loads((path / "complete.json").read_text())
    change(index)
    text = json.dumps(index).encode()
    (path / "index.json").write_bytes(text)
    marker.pop("own_crc32")
    marker["files"]["index.json"], marker["crc32"]["index.json"] = len(text), zlib.crc32(text)
    (path / "complete.json").write_text(json.dumps({**marker, "own_crc32": zlib.crc32(json.dumps(marker).encode())}))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in JSON, with each of its keys or positions."""
    for key in range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ():
        yield value, key
        yield from places(value[key])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "c"
    write(path, tensors={**tensors(), "cut": CUT}, shares={"cut": QUARTERS})
    return path


@given(st.data())
@settings(max_examples=200, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_changed_index_is_an_error_that_changes_nothing_or_loads_equal_values(saved: Path, data: st.DataObject) -> None:
    sound = json.loads((saved / "index.json").read_text())

    def damage(index: Any) -> None:
        for _ in range(data.draw(st.integers(1, 2))):
            found = list(places(index))
            holder, key = found[data.draw(st.integers(0, len(found) - 1))]
            way = data.draw(st.sampled_from(["replace", "remove", "copy", "exchange", "grow"]))
            if way == "remove":
                del holder[key]
            elif way == "copy" and isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            elif way == "grow" and type(holder[key]) is int:
                holder[key] += data.draw(st.integers(-2, 2))
            elif way == "exchange":
                other = found[data.draw(st.integers(0, len(found) - 1))]
                holder[key] = (
                    copy.deepcopy(other[0][other[1]])
                    if other[1] in (range(len(other[0])) if isinstance(other[0], list) else other[0])
                    else 0
                )
            else:
                holder[key] = copy.deepcopy(data.draw(st.sampled_from(JUNK)))

    own = {**tensors(0.0), "cut": torch.zeros(4, 5)}
    rewrite(saved, damage)
    try:
        read(saved, own)
    except CheckpointError:
        assert all(torch.equal(value, {**tensors(0.0), "cut": torch.zeros(4, 5)}[name]) for name, value in own.items())
    else:
        assert all(torch.equal(value, {**tensors(), "cut": CUT}[name]) for name, value in own.items())
    finally:
        rewrite(saved, lambda index: (index.clear(), index.update(sound)))


def of(index: Any, key: str) -> Any:
    return next(each for each in index["tensors"] if each["key"] == key)


FAULTS: dict[str, Callable[[Any], Any]] = {
    r"model\.cut\[4, 5\]: its pieces are not each element once": lambda index: of(index, "model.cut")["pieces"].pop(),
    r"\[0, 0\] to \[-1, 2\] is no part of it": lambda index: of(index, "model.cut")["pieces"][0].update(stop=[-1, 2]),
    r"\[2, 0\] to \[0, 2\] is no part of it": lambda index: of(index, "model.cut")["pieces"][2].update(start=[2, 0], stop=[0, 2]),
    r"has more bytes than rank_0\.safetensors": lambda index: (
        of(index, "model.a.b.weight").update(shape=[10**9]),
        of(index, "model.a.b.weight")["pieces"][0].update(stop=[10**9]),
    ),
    "has the unknown type 'float31'": lambda index: of(index, "model.cut").update(dtype="float31"),
    "has the unknown type 'load'": lambda index: of(index, "model.cut").update(dtype="load"),
    r"extra\.step is 'many', not a number of steps": lambda index: index["plain"].update({"extra.step": "many"}),
    r"extra\.step is None": lambda index: index["plain"].pop("extra.step"),
    "lies in '../x', which is not a file": lambda index: of(index, "model.cut")["pieces"][0].update(file="../x"),
    r"extra\.scheduler: .*no kind of value": lambda index: index["plain"].update({"extra.scheduler": {}}),
    "there is no tensor 'gone' of one piece": lambda index: index["plain"].update({"extra.x": {"tensor": "gone", "is_cuda": True}}),
    r"plain: None is not a mapping": lambda index: index.update(plain=None),
    r"has data of another form than a save writes \(AttributeError": lambda index: index["plain"].update({"options.0": [1]}),
}


@pytest.mark.parametrize("said", FAULTS)
def test_what_is_wrong_with_an_index_is_said(tmp_path: Path, said: str) -> None:
    path = tmp_path / "c"
    write(path, tensors={**tensors(), "cut": CUT}, shares={"cut": QUARTERS}, optimizer=OPTIMIZER, extras=EXTRAS)
    rewrite(path, FAULTS[said])
    with pytest.raises(CheckpointError, match=said):
        read(path, {**tensors(0.0), "cut": torch.zeros(4, 5)})


def test_all_faults_of_an_index_are_one_error(tmp_path: Path) -> None:
    write(tmp_path / "c")

    def change(index: Any) -> None:
        of(index, "model.steps")["dtype"] = "int63"
        of(index, "model.view")["pieces"].clear()
        index["plain"]["extra.step"] = -1

    rewrite(tmp_path / "c", change)
    with pytest.raises(CheckpointError, match=r"\(3 faults\): model\.steps .* model\.view.* extra\.step"):
        read(tmp_path / "c")


@pytest.mark.parametrize(
    ("key", "value"),
    [("extra.position", 3), ("extra.loss_scale", {"dict": [["x", 1]]}), ("extra.decay", "much"), ("rank.0.random", {"dict": [["cpu", 1]]})],
)
def test_what_is_restored_last_is_checked_first(tmp_path: Path, key: str, value: Any) -> None:
    engine = parallelize()
    engine.step(BATCH)
    engine.save(tmp_path / "c")
    rewrite(tmp_path / "c", lambda index: index["plain"].update({key: value}))
    other = parallelize()
    before = other.state_dict()
    with pytest.raises(CheckpointError, match="has data of another form than a save writes"):
        other.load(tmp_path / "c")
    assert before is not None and other.step_number == 0
    assert all(torch.equal(value, before[name]) for name, value in (other.state_dict() or {}).items())


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=5), st.tuples(st.integers(0, 3), st.integers(0, 3)))
@settings(max_examples=200, deadline=None, database=None, derandomize=True)
def test_tiles_are_each_position_once(corners: list[tuple[int, ...]], shape: tuple[int, int]) -> None:
    found = [Box((min(a, c), min(b, d)), (max(a, c), max(b, d))) for a, b, c, d in corners]
    found = [box for box in found if 0 not in box.shape and box.stop[0] <= shape[0] and box.stop[1] <= shape[1]]
    hits = torch.zeros(shape)
    for box in found:
        box.of(hits).add_(1)
    assert _are_tiles(found, shape) == bool((hits == 1).all())
