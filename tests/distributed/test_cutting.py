"""The law of lowered cuts: a model on the parts of 2 or 3 devices gives the loss and every gradient of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.distributed import cutting_models
from tests.distributed.cutting import chosen, chosen_labels, composed_errors, each, errors, staged_errors
from tests.distributed.cutting_operators import failures, prepare_cases
from tests.distributed.world import World
from tests.examples import further
from tests.hf_models import BUILDERS
from whale.ir.plan import Shard

TOLERANCE = 1e-10
Law = Callable[..., dict[str, float]]


def worst(found: list[dict[str, float]]) -> tuple[float, str]:
    """The largest error on any rank, and of what."""
    return max((error, name) for errors_ in found for name, error in errors_.items())


def check(world: World, builder: str, cuts: Sequence[tuple[Shard, ...]], num_parts: int, law: Law = errors, *more: Any) -> None:
    """That a law holds for all these cuts in so many parts, on ranks that are started once."""
    found = world.run(each, law, builder, cuts, *more, num_ranks=num_parts)
    for shards, of_ranks in zip(cuts, zip(*found, strict=True), strict=True):
        assert worst(list(of_ranks)) < (TOLERANCE, ""), shards


@pytest.mark.parametrize("family", BUILDERS)
def test_a_hugging_face_model_on_parts_is_the_model(world: World, family: str) -> None:
    builder = f"tests.hf_models:{family}"
    for num_parts, seeds in ((2, (0, 2, *further([4]))), (3, (1, *further([3])))):
        check(world, builder, [world.prepare(chosen, builder, num_parts, seed, "train", seed == 0) for seed in seeds], num_parts)


@pytest.mark.parametrize("family", BUILDERS)
def test_a_hugging_face_model_with_random_bridges_is_the_model(world: World, family: str) -> None:
    builder = f"tests.hf_models:{family}"
    for num_parts, seeds in ((2, (0, *further([2]))), (3, (1, *further([3])))):
        check(world, builder, [world.prepare(chosen_labels, builder, num_parts, seed) for seed in seeds], num_parts)


@pytest.mark.parametrize("name", cutting_models.BUILDERS)
def test_a_small_model_on_parts_is_the_model(world: World, name: str) -> None:
    builder = f"tests.distributed.cutting_models:{name}"
    for num_parts, seeds in ((2, (0, 2, *further([4]))), (3, (1, 3, *further([5])))):
        cuts = [world.prepare(chosen, builder, num_parts, seed) for seed in seeds]
        assert all(cuts)
        check(world, builder, cuts, num_parts)


def test_attention_with_a_bias_and_a_mask_on_parts(world: World) -> None:
    builder = "tests.distributed.cutting_models:attending_masked"
    for num_parts, seeds in ((2, (0, 1, 2)), (3, (3, 4))):
        cuts = [world.prepare(chosen_labels, builder, num_parts, seed) for seed in seeds]
        assert any("sequence" in shard.axis for shards in cuts for shard in shards)
        check(world, builder, cuts, num_parts)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_one_lowering_serves_any_number_of_rows(world: World, family: str) -> None:
    builder = f"tests.hf_models:{family}"
    check(world, builder, [world.prepare(chosen, builder, 2, 3)], 2, errors, "train", False, 3)


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "resnet"])
def test_outputs_are_gathered(world: World, family: str) -> None:
    builder = f"tests.distributed.cutting_models:{family}_predicting"
    check(world, builder, [world.prepare(chosen, builder, 2, seed, "predict") for seed in range(2)], 2, errors, "predict")


@pytest.mark.parametrize(("family", "share"), [("gpt2", 0.5), ("llama", 0.3), ("llama", 0.62), ("t5", 0.4), ("vit", 0.57)])
def test_stages_hand_over_whole_tensors(world: World, family: str, share: float) -> None:
    builder = f"tests.hf_models:{family}"
    check(world, builder, [world.prepare(chosen, builder, 2, seed) for seed in range(3)], 2, staged_errors, share)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_parts_can_be_recomputed_and_their_weight_gradients_can_wait(world: World, family: str) -> None:
    builder = f"tests.hf_models:{family}"
    check(world, builder, [world.prepare(chosen, builder, 2, seed) for seed in range(2)], 2, composed_errors)


RULES, MORE = ("tests.unit.axes.test_rules_alone", "CASES"), ("tests.distributed.cutting_operators", "MORE")


@pytest.mark.parametrize(("module", "name", "num_parts"), [(*RULES, 2), (*MORE, 3), *further([(*RULES, 3), (*MORE, 2)])])
def test_every_operator_on_parts(world: World, module: str, name: str, num_parts: int) -> None:
    world.prepare(prepare_cases, module, name)
    for tried, *found in world.run(failures, module, name, num_ranks=num_parts):
        assert not found, "\n".join(found)
        assert int(tried.split()[0]) > 50


def test_without_entering_the_gradients_are_wrong(world: World) -> None:
    """The negative control."""
    builder = "tests.hf_models:gpt2"
    cuts = [world.prepare(chosen, builder, 2, seed) for seed in range(3)]
    for found in zip(*world.run(each, errors, builder, cuts, "train", True, num_ranks=2), strict=True):
        assert worst(list(found))[0] > 1e-2
        assert found[0]["loss"] < TOLERANCE
