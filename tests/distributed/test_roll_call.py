"""A rank that does something alone is an error on all ranks at once, in our words, and so is one that has left."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

import whale
from tests.distributed.test_bad_batches import captured_scopes, loss, make_batch
from tests.distributed.training import make_cluster
from tests.distributed.world import RankFailure, World
from whale.errors import RuntimeFault, WhaleError


def make_engine(num_ranks: int) -> whale.Engine:
    made = captured_scopes("none")
    return whale.parallelize(
        made.model,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch=made.batch,
        config={"communication.timeout_seconds": 60.0},
        cluster=make_cluster((1.0,) * num_ranks),
    )


def act(engine: whale.Engine, action: str, path: str) -> None:
    if action in ("save", "load"):
        getattr(engine, action)(Path(path))
    elif action == "load_state_dict":
        engine.load_state_dict(captured_scopes("none").model.state_dict())
    elif action == "state_dict":
        engine.state_dict()
    else:
        getattr(engine, action)(make_batch(8))


def act_alone(rank: int, num_ranks: int, actions: tuple[tuple[str, str], ...], path: str) -> list[tuple[str, str]]:
    """What is said where rank 0 does the first thing and the others the second, one pair after the other."""
    engine, said = make_engine(num_ranks), []
    for alone, others in actions:
        engine.step(make_batch(8))
        with pytest.raises(RuntimeFault) as caught:
            act(engine, others if rank else alone, path)
        said.append((caught.value.message, str(caught.value.hint)))
    engine.step(make_batch(8))
    engine.close()
    return said


def test_what_one_rank_does_alone_is_named_on_all(world: World, tmp_path: Path) -> None:
    actions = tuple(
        (alone, "step") for alone in ("save", "evaluate", "state_dict", "load", "predict", "load_state_dict", "forward_backward")
    )
    for said in world.run(act_alone, (*actions, ("step", "save")), str(tmp_path / "c"), num_ranks=3):
        for (alone, _), (message, hint) in zip(actions, said, strict=False):
            rule = "ranks call different methods of the engine"
            assert sorted(message.removeprefix(rule).strip(" ()").split("; ")) == sorted(
                [f"{alone}: rank 0 alone", "step: all ranks but 0"]
            )
            assert message.startswith(rule) and hint.startswith(f"call engine.{alone} on every rank")
        assert "step: rank 0 alone" in said[-1][0], "one batch fewer on the others"


def masked(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    counted = (batch["target"] > 0).to(output.dtype)
    return ((output - batch["target"]) ** 2 * counted).sum(), counted.sum()


def evaluate_alone(rank: int, num_ranks: int) -> tuple[str, list[float]]:
    """What is said where rank 0 evaluates while the others step, then losses, with weights that the ranks sum."""
    data = [dict(zip(("input", "target"), row, strict=True)) for row in zip(*make_batch(8).values(), strict=True)]
    engine = whale.parallelize(
        captured_scopes("none").model,
        loss=masked,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch=make_batch(8),
        config={"communication.timeout_seconds": 30.0},
        cluster=make_cluster((1.0,) * num_ranks),
    )
    losses = [float(engine.step(batch)) for batch in engine.loader(data, global_batch_size=8)]
    with pytest.raises(RuntimeFault) as caught:
        for batch in engine.loader(data, global_batch_size=8):
            (engine.step if rank else engine.evaluate)(batch)
    losses += [float(engine.step(batch)) for _ in range(2) for batch in engine.loader(data, global_batch_size=8)]
    losses.append(float(engine.step(make_batch(8))))
    engine.close()
    return caught.value.message, losses


def test_ranks_that_sum_weights_of_the_loss_are_told_too(world: World) -> None:
    ((_, expected),) = world.run(train_masked, num_ranks=1)
    for said, losses in world.run(evaluate_alone, num_ranks=3):
        assert "evaluate: rank 0 alone" in said
        assert losses == pytest.approx(expected, rel=1e-5)


def train_masked(rank: int, num_ranks: int) -> tuple[str, list[float]]:
    """The losses of the same steps on one device, by plain torch."""
    model, batch = captured_scopes("none").model, make_batch(8)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(4):
        optimizer.zero_grad()
        total, weight = masked(model(batch["input"]), batch)
        (total / weight).backward()
        optimizer.step()
        losses.append(float(total / weight))
    return "", losses


def leave(rank: int, num_ranks: int, action: str, path: str) -> str:
    """What is said where rank 1 ends before the others come to an action."""
    engine = make_engine(num_ranks)
    engine.step(make_batch(8))
    if rank == 1:
        os._exit(0)
    with pytest.raises(WhaleError) as caught:
        act(engine, action, path)
    raise caught.value


@pytest.mark.parametrize("action", ["step", "save", "state_dict"])
def test_a_rank_that_has_left_is_told_in_our_words(world: World, tmp_path: Path, action: str) -> None:
    with pytest.raises(RankFailure) as caught:
        world.run(leave, action, str(tmp_path / "c"), num_ranks=2)
    error = caught.value.errors[0]
    what = "comparing the batch" if action == "step" else action
    assert isinstance(error, RuntimeFault)
    assert error.message.startswith(f"{what} with rank 1 did not complete: a rank has left"), error.message


def gather_unlike(rank: int, num_ranks: int) -> tuple[str, list[str]]:
    engine = make_engine(num_ranks)
    with pytest.raises(RuntimeFault) as caught:
        engine.state_dict(rank=rank)
    found = engine.state_dict(rank=1)
    engine.step(make_batch(8))
    engine.close()
    return caught.value.message, [] if found is None else sorted(found)


def test_ranks_that_gather_on_unlike_ranks_are_told(world: World) -> None:
    (first, nothing), (second, names) = world.run(gather_unlike, num_ranks=2)
    assert first == "ranks call engine.state_dict with different arguments (here 0, another on some rank)"
    assert "(here 1," in second and names and not nothing
