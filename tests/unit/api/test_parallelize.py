"""What is wrong with the arguments of `parallelize` or with a batch is one clear error, and nothing has changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.captures import alike, at_hand, captured_once
from whale.errors import BatchError, CaptureError, CheckpointError, ConfigError, PlanError, WhaleError
from whale.ir.profile import KindProfile, Profile
from whale.ir.serialization import to_json
from whale.measure import devices_at_hand

torch.set_num_threads(1)

BATCH = {"input": torch.randn(8, 4), "target": torch.randn(8, 1)}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["target"])


def built() -> tuple[nn.Module, dict[str, Tensor], Any]:
    return nn.Linear(4, 1), BATCH, loss


@pytest.fixture(autouse=True)
def served() -> Iterator[None]:
    with at_hand():
        yield


def parallelize(model: Any = None, **changes: Any) -> whale.Engine:
    arguments = {"loss": loss, "optimizer": partial(torch.optim.SGD, lr=0.1), "batch": BATCH, **changes}
    return whale.parallelize(alike(captured_once(built), nn.Linear(4, 1)) if model is None else model, **arguments)


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"model": lambda input: input}, CaptureError, "model= is function, not a torch.nn.Module"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, ConfigError, "optimizer= is SGD, not a function"),
        ({"scheduler": 3}, ConfigError, "scheduler= is int, not a function"),
        ({"config": {"pipeline.num_micro_batches": 2}}, ConfigError, "did you mean 'pipeline.num_micro_batch'"),
        ({"config": {"pipeline.num_micro_batch": 16}}, BatchError, "the batch has 8, and .* need 16"),
        (
            {"config": {"pipeline.schedule": "interleaved", "pipeline.num_chunks": 9}},
            ConfigError,
            "cannot be cut into the 9 stages of schedule",
        ),
        ({"config": {"recompute.policy": {0: 1.5}}}, ConfigError, "stage 0: 1.5"),
        ({"config": {"cluster.profile": "none.json"}}, ConfigError, "cannot read the profile none.json"),
        ({"cluster": "none.yaml"}, WhaleError, "cannot read none.yaml"),
        ({"plan": "none.json"}, PlanError, "cannot read the plan none.json"),
        ({"plan": 3}, ConfigError, "plan= is int, not one of Plan, str, Path, or None"),
        ({"cluster": 4}, ConfigError, "cluster= is int, not one of Cluster, str, Path, or None"),
        ({"optimizer": lambda owned: None}, ConfigError, "optimizer= returned None, not an optimizer"),
        ({"optimizer": lambda owned: 3}, ConfigError, "optimizer= returned int, not an optimizer"),
        ({"scheduler": lambda optimizer: None}, ConfigError, "scheduler= returned None, not a scheduler"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], kind: type[WhaleError], said: str) -> None:
    with pytest.raises(kind, match=said):
        parallelize(**changes)


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', "3"])
def test_what_is_no_plan(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"plan.json is not a plan"):
        parallelize(plan=tmp_path / "plan.json")


def test_a_plan_from_a_file_and_one_of_another_model(tmp_path: Path) -> None:
    plan = parallelize(config={"pipeline.num_micro_batch": 2}).plan
    (tmp_path / "plan.json").write_text(to_json(plan))
    assert parallelize(plan=tmp_path / "plan.json").plan == plan
    with pytest.raises(PlanError, match="the plan was made for another model"):
        parallelize(nn.Sequential(nn.Linear(4, 1), nn.Tanh()), plan=plan)


def test_scopes_left_open_by_an_exception_do_not_count() -> None:
    with pytest.raises(KeyError), whale.replicate(7, name="broken"):
        raise KeyError
    assert [graph.name for graph in parallelize().plan.task_graphs] == ["model"]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"input": torch.zeros(0, 4), "target": torch.zeros(0, 1)}, "the batch has 0 rows"),
        ({"input": torch.zeros(8, 4)}, r"missing: batch\['target'\]"),
        ({"input": torch.zeros(8, 3), "target": torch.zeros(8, 1)}, "is .rows, 3., the example's .rows, 4."),
        ({"input": torch.zeros(8, 4), "target": torch.zeros(7, 1)}, "different numbers of rows"),
    ],
)
def test_a_bad_batch_changes_nothing(batch: dict[str, Tensor], said: str) -> None:
    engine = parallelize(config={"pipeline.num_micro_batch": 4})
    engine.step(BATCH)
    before = {name: value.clone() for name, value in (engine.state_dict() or {}).items()}
    with pytest.raises(BatchError, match=said):
        engine.step(batch)
    after = engine.state_dict() or {}
    assert engine.step_number == 1 and all(torch.equal(value, after[name]) for name, value in before.items())
    engine.step(BATCH)


def test_a_half_written_checkpoint_changes_nothing(tmp_path: Path) -> None:
    engine = parallelize()
    engine.save(tmp_path / "whole")
    engine.step(BATCH)
    engine.save(tmp_path / "half")
    (tmp_path / "half" / "complete.json").unlink()
    before = {name: value.clone() for name, value in (engine.state_dict() or {}).items()}
    with pytest.raises(CheckpointError, match=r"complete\.json, which is written last, is missing") as caught:
        engine.load(tmp_path / "half")
    assert "whole" in str(caught.value)
    after = engine.state_dict() or {}
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    engine.load(tmp_path / "whole")
    assert engine.step_number == 0


def test_one_row_is_evaluated_by_the_example_of_the_training() -> None:
    model = nn.Linear(4, 1)
    engine = parallelize(model)
    one = {name: value[:1] for name, value in BATCH.items()}
    assert torch.allclose(engine.predict({"input": one["input"]}), model(one["input"]))
    assert torch.isclose(engine.evaluate(one), loss(model(one["input"]), one).double())


def test_a_profile_of_another_torch_is_told_and_of_another_model_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(to_json(Profile("another", (KindProfile(devices_at_hand(1).devices[0].kind, "", "1.0", (8,), ()),))))
    with (
        pytest.warns(UserWarning, match=r"was measured with torch 1\.0, this is torch"),
        pytest.raises(ConfigError, match="the profile was measured on another model"),
    ):
        parallelize(config={"cluster.profile": str(path)})


class Moving(nn.Module):
    """Draws random numbers, and writes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Dropout(0.5)

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(self.drop(self.norm(input)))


@pytest.mark.parametrize("by_key", [False, True])
def test_the_norm_that_is_clipped_is_that_of_what_is_applied(by_key: bool) -> None:
    torch.manual_seed(0)
    config = {"gradient.clip_norm": 0.05} if by_key else {}
    engine, plain = parallelize(model := nn.Linear(4, 1), config=config), nn.Linear(4, 1)
    plain.load_state_dict(model.state_dict())
    batches = [{"input": torch.randn(8, 4), "target": torch.randn(8, 1)} for _ in range(4)]
    for batch in batches:
        engine.forward_backward(batch)
        (loss(plain(batch["input"]), batch) / 4).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    if not by_key:
        norm = engine.clip_grad_norm_(0.05, scale=1 / 4)
        torch.testing.assert_close(norm.float(), expected)
        with pytest.raises(ConfigError, match=r"scale=1, but engine.clip_grad_norm_ has clipped the gradients for scale=0.25"):
            engine.update()
    engine.update(scale=1 / 4)
    for name, own in plain.named_parameters():
        torch.testing.assert_close(engine.gradients()[name], own.grad)


def test_stages_that_cannot_be_had_are_told() -> None:
    with pytest.warns(UserWarning, match="pipeline.num_stages is 4, but the plan has 1"):
        parallelize(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)), nn.Linear(4, 1)), config={"pipeline.num_stages": 4})


def test_gradients_that_are_clipped_too_late_are_told() -> None:
    engine = parallelize(nn.Linear(4, 1))
    batch = {"input": torch.randn(8, 4), "target": torch.randn(8, 1)}
    engine.step(batch)
    assert sum(own.numel() for own in engine.parameters()) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(batch)
    nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
    with pytest.warns(UserWarning, match="gradients were written after engine.step had applied them, which has no effect"):
        engine.step(batch)


def test_gradients_are_written_in_place_only() -> None:
    engine = parallelize(nn.Linear(4, 1))
    engine.forward_backward({"input": torch.randn(8, 4), "target": torch.randn(8, 1)})
    gradients = engine.gradients()
    with pytest.raises(ConfigError, match="what is put in for 'weight' would not be applied") as caught:
        gradients["weight"] = gradients["weight"] * 0
    assert "engine.gradients()['weight'].mul_(mask)" in str(caught.value)
    with pytest.raises(ConfigError):
        gradients.update(weight=torch.zeros(1, 4))
    assert type(copy.deepcopy(gradients)) is dict and copy.deepcopy(gradients).keys() == gradients.keys()
    gradients["weight"] *= 0
    before = (engine.state_dict() or {})["weight"]
    engine.update()
    torch.testing.assert_close((engine.state_dict() or {})["weight"], before)


def test_gradients_of_batches_wait_for_an_update(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine, plain = parallelize(model := nn.Linear(4, 1)), nn.Linear(4, 1)
    plain.load_state_dict(model.state_dict())
    batches = [{"input": torch.randn(8, 4), "target": torch.randn(8, 1)} for _ in range(3)]
    for batch in batches[:2]:
        assert float(engine.step(batch, update=False)) == pytest.approx(float(loss(plain(batch["input"]), batch).detach()))
        loss(plain(batch["input"]), batch).backward()
    with pytest.raises(BatchError):
        engine.forward_backward({"input": torch.randn(8, 3), "target": torch.randn(8, 1)})
    for verb, call in (("save", lambda: engine.save(tmp_path / "c")), ("replan", engine.replan)):
        with pytest.raises(ConfigError, match=f"engine.{verb} would lose the gradients of 2 forward_backward calls"):
            call()
    norm = engine.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm.float(), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    loss(plain(batches[2]["input"]), batches[2]).backward()
    engine.forward_backward(batches[2])
    engine.update(scale=0.5)
    with torch.no_grad():
        for name, own in plain.named_parameters():
            assert own.grad is not None
            torch.testing.assert_close(engine.gradients()[name], own.grad * 0.5)
            own.sub_(0.1 * 0.5 * own.grad)
    torch.testing.assert_close(engine.state_dict(), dict(plain.state_dict()))
    assert engine.step_number == 1
    with pytest.raises(ConfigError, match=r"engine\.update was called without gradients"):
        engine.update()
    with pytest.raises(ConfigError, match="scale=nan is not finite"):
        engine.update(scale=float("nan"))
    engine.forward_backward(batches[0])
    engine.step(batches[1])  # takes what waits along
    assert engine.step_number == 2


def test_batches_of_one_update_draw_other_numbers_and_are_undone_together() -> None:
    engine = parallelize(Moving(), config={"gradient.skip_nonfinite": True})
    first = engine.forward_backward(BATCH)
    alone = {name: own.clone() for name, own in engine.gradients().items()}
    assert float(engine.forward_backward(BATCH)) != float(first), "dropout draws anew"
    assert not torch.allclose(engine.gradients()["linear.weight"], 2 * alone["linear.weight"])
    engine.update()
    before = {name: own.clone() for name, own in engine.state_dict().items()}
    engine.forward_backward(BATCH)
    assert engine.state_dict()["norm.num_batches_tracked"] == 3
    engine.forward_backward(BATCH | {"target": torch.full((8, 1), torch.inf)})
    with pytest.warns(UserWarning, match="step 2 is skipped"):
        engine.update()
    after = engine.state_dict()
    assert all(torch.equal(own, after[name]) for name, own in before.items())


def test_averages_that_are_not_kept(tmp_path: Path) -> None:
    engine = parallelize()
    for call in (engine.state_dict, partial(engine.evaluate, BATCH), partial(engine.predict, BATCH)):
        with pytest.raises(ConfigError, match="there are no averaged weights"):
            call(averaged=True)
    with pytest.raises(ConfigError, match=r"decay=1\.5 is not between 0 and 1"):
        engine.average(1.5)
    engine.average(0.9)
    torch.testing.assert_close(engine.state_dict(averaged=True), engine.state_dict())
    engine.step(BATCH)
    torch.testing.assert_close(engine.predict(BATCH, averaged=True), engine.predict(BATCH))
    engine.step(BATCH)
    averaged = engine.state_dict(averaged=True)
    engine.save(tmp_path / "c")
    other = parallelize()
    other.load(tmp_path / "c")
    assert other.state.decay == 0.9
    torch.testing.assert_close(other.state_dict(averaged=True), averaged)


def test_an_engine_prints_its_rank_its_step_and_its_plan() -> None:
    said = "Engine(rank 0, step 0, 1 replica x 1 stage; world size 1 = DP 1 x PP 1 x TP 1)"
    assert str(parallelize()) == said
