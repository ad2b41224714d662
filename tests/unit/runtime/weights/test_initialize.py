"""Initial weights: what owns, splits or orders tensors changes no value; what nothing fills is named."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import hf_models
from tests.examples import at_most
from whale.dry_run import LiveBytes
from whale.errors import InitializationError
from whale.runtime.weights.initialize import initial_tensors
from whale.runtime.weights.initializers import named_tensors

CPU = torch.device("cpu")
FAMILIES = ("gpt2", "bert", "t5", "vit", "resnet", "llama", "mixtral")


def fill(model: nn.Module, names: list[str] | None = None, seed: int = 0, **options: object) -> dict[str, Tensor]:
    return initial_tensors(model, list(named_tensors(model)) if names is None else names, seed=seed, device=lambda _: CPU, **options)


def on_meta(build: object, *arguments: object) -> nn.Module:
    with torch.device("meta"):
        return build(*arguments)


class Own(nn.Module):
    """A tied pair, attention with a child it fills itself, statistics, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32, padding_idx=0)
        self.attention = nn.MultiheadAttention(32, 4)
        self.norm = nn.BatchNorm1d(32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.table.weight
        self.head.weight.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_models_are_filled_as_they_fill_themselves(family: str) -> None:
    with torch.random.fork_rng(devices=[]):
        real, _ = getattr(hf_models, family)()
    meta = on_meta(type(real), real.config)
    filled, expected = fill(meta), named_tensors(real)
    assert filled.keys() == expected.keys()
    for name, value in expected.items():
        mine, theirs = filled[name].detach().double(), value.detach().double()
        assert (filled[name].dtype, filled[name].requires_grad) == (value.dtype, value.requires_grad)
        if mine.numel() < 100 and theirs.std(unbiased=False) > 0 and theirs.unique().numel() > 2 and isinstance(value, nn.Parameter):
            continue  # random, and too few values to compare their spread
        if theirs.unique().numel() <= 2 or not isinstance(value, nn.Parameter):
            assert torch.equal(mine, theirs), name  # constants and tables
        else:
            assert math.isclose(mine.std(), theirs.std(), rel_tol=0.25), name
            assert abs(mine.mean() - theirs.mean()) < 6 * theirs.std() / math.sqrt(mine.numel()), name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_values_do_not_depend_on_what_else_a_rank_owns(family: str) -> None:
    real, _ = getattr(hf_models, family)()
    meta = on_meta(type(real), real.config)
    everything = fill(meta)
    names = list(everything)
    for part in (names[::2], names[1::2], names[::-1]):
        mine = fill(meta, part)
        assert list(mine) == part
        assert all(torch.equal(mine[name], everything[name]) for name in part)


@given(st.data())
@at_most(25)
def test_any_split_of_a_plain_model_gives_the_same_values(data: st.DataObject) -> None:
    meta = on_meta(Own)
    everything = fill(meta, seed=3)
    part = data.draw(st.permutations(list(everything)).flatmap(lambda names: st.integers(1, len(names)).map(lambda count: names[:count])))
    mine = fill(meta, part, seed=3)
    assert all(torch.equal(mine[name], everything[name]) for name in part)


def test_a_plain_model_is_filled_as_torch_fills_it() -> None:
    filled = fill(on_meta(Own))
    assert torch.equal(filled["table.weight"][0], torch.zeros(32))
    assert filled["head.weight"] is filled["table.weight"]
    assert not filled["table.weight"].requires_grad
    assert isinstance(filled["table.weight"], nn.Parameter)
    assert filled["attention.out_proj.bias"].eq(0).all()  # its own reset fills it otherwise; the attention's wins
    assert filled["attention.in_proj_weight"].abs().max() <= math.sqrt(6 / (32 + 96))
    assert torch.equal(filled["norm.running_var"], torch.ones(32))
    assert filled["norm.num_batches_tracked"] == 0 and not isinstance(filled["norm.running_var"], nn.Parameter)


def test_seeds_and_modules_give_different_values() -> None:
    meta = on_meta(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    one, two = fill(meta, seed=1), fill(meta, seed=2)
    assert not torch.equal(one["0.weight"], two["0.weight"])
    assert not torch.equal(one["0.weight"], one["1.weight"])


def test_the_callers_random_numbers_and_model_are_left_alone() -> None:
    meta = on_meta(Own)
    before = {name: (id(tensor), tensor.is_meta) for name, tensor in named_tensors(meta).items()}
    attributes = {name: set(vars(module)) for name, module in meta.named_modules()}
    state = torch.random.get_rng_state()
    fill(meta)
    assert torch.equal(state, torch.random.get_rng_state())
    assert before == {name: (id(tensor), tensor.is_meta) for name, tensor in named_tensors(meta).items()}
    assert attributes == {name: set(vars(module)) for name, module in meta.named_modules()}


def test_real_tensors_are_cloned_and_only_those_asked_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16))
    model[1].bias.requires_grad_(False)
    mine = fill(model, ["0.weight", "1.bias"])
    assert list(mine) == ["0.weight", "1.bias"]
    assert torch.equal(mine["0.weight"], model[0].weight) and mine["0.weight"].data_ptr() != model[0].weight.data_ptr()
    assert mine["0.weight"].is_leaf and mine["0.weight"].requires_grad
    assert mine["1.bias"].dtype == torch.bfloat16 and not mine["1.bias"].requires_grad


def test_names_the_model_has_not() -> None:
    with pytest.raises(InitializationError, match="no parameter or buffer named 'wieght'"):
        fill(nn.Linear(2, 2), ["wieght"])


class Unfilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.register_buffer("positions", torch.arange(4), persistent=False)


def test_everything_that_nothing_fills_is_named_at_once() -> None:
    with pytest.raises(InitializationError) as caught:
        fill(on_meta(Unfilled))
    text = str(caught.value)
    assert "scale (parameter float32[4] of Unfilled)" in text
    assert "mask (buffer bool[4, 4] of Unfilled)" in text and "positions (buffer int64[4] of Unfilled)" in text
    assert "inner" not in text and "initialize=" in text


def test_initialize_fills_what_the_rest_does_not() -> None:
    def initialize(module: nn.Module) -> None:
        if isinstance(module, Unfilled):
            nn.init.ones_(module.scale)
            module.mask.copy_(torch.ones(4, 4).tril().bool())
            module.positions = torch.arange(4)  # replaced rather than written

    filled = fill(on_meta(Unfilled), initialize=initialize)
    assert torch.equal(filled["scale"], torch.ones(4)) and torch.equal(filled["positions"], torch.arange(4))
    assert torch.equal(filled["mask"], torch.ones(4, 4).tril().bool())
    assert filled["inner.weight"].abs().max() <= 0.5  # torch's own


def test_initialize_wins_over_the_modules_own() -> None:
    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 7)

    filled = fill(on_meta(nn.Linear, 3, 3), initialize=initialize)
    assert filled["weight"].eq(7).all() and filled["bias"].abs().max() <= 1


class Half(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(6, dtype=dtype))

    def reset_parameters(self) -> None:
        self.table[:3].zero_()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
def test_a_tensor_filled_in_part_is_unfilled(dtype: torch.dtype) -> None:
    with pytest.raises(InitializationError, match="table"):
        fill(on_meta(Half, dtype))


class Normalised(nn.Module):
    """One tensor's start depends on another's values."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.empty(5, 3))
        self.length = nn.Parameter(torch.empty(5))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.direction)
        with torch.no_grad():
            self.length.copy_(self.direction.norm(dim=1))


def test_tensors_that_depend_on_each_other_fit_together_however_they_are_owned() -> None:
    meta = on_meta(Normalised)
    direction, length = fill(meta, ["direction"])["direction"], fill(meta, ["length"])["length"]
    assert torch.equal(length, direction.norm(dim=1))


class Halved(nn.Sequential):
    """A parent that changes what its child has filled."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self[0].weight.mul_(0).add_(0.5)


def test_outer_modules_change_what_inner_ones_filled() -> None:
    filled = fill(on_meta(lambda: Halved(nn.Linear(3, 3), nn.Linear(3, 3))))
    assert filled["0.weight"].eq(0.5).all() and not filled["1.weight"].eq(0.5).any()


class Truncated(nn.Module):
    """Rejection sampling skips meta tensors, so a trial on meta could take it for one that fills nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(40, 40)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.001)
            nn.init.trunc_normal_(module.bias, std=0.001, a=-0.0005, b=0.0005)


def test_initialisers_that_look_at_is_meta_are_seen() -> None:
    filled = fill(on_meta(Truncated))
    assert math.isclose(filled["inner.weight"].detach().std(), 0.001, rel_tol=0.2)
    assert filled["inner.bias"].abs().max() <= 0.0005


class Reads(nn.Module):
    """An initialiser that needs values, so it cannot be tried on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.bound = nn.Parameter(torch.empty(()))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight)
        self.bound.data = torch.tensor(max(self.weight.tolist()))


def test_an_initialiser_that_reads_values_runs_with_its_modules_tensors() -> None:
    meta = on_meta(Reads)
    assert fill(meta, ["bound"])["bound"] == fill(meta, ["weight"])["weight"].max()


class Failing(nn.Linear):
    def reset_parameters(self) -> None:
        raise ValueError("no such distribution")


def test_an_initialiser_that_fails_is_named() -> None:
    meta = on_meta(lambda: object.__new__(Failing))
    nn.Module.__init__(meta)
    meta.weight, meta.bias = nn.Parameter(torch.empty(2, 2, device="meta")), None
    with pytest.raises(InitializationError, match=r"reset_parameters\(\) failed on weight .*ValueError: no such distribution"):
        fill(meta)


class Stack(nn.Module):
    """Layers of one size."""

    def __init__(self, num_layers: int = 6, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(num_layers))


def rows_of(start: int, stop: int) -> Callable[[str, Tensor], Tensor]:
    return lambda _, whole: whole.narrow(0, start, stop - start)


@pytest.mark.parametrize("is_meta", [True, False])
def test_parts_are_those_of_the_whole_tensors_and_lie_alone(is_meta: bool) -> None:
    torch.manual_seed(3)
    model = on_meta(Stack) if is_meta else Stack()
    names = list(named_tensors(model))
    whole = fill(model)
    for shard in (rows_of(3, 20), lambda _, tensor: tensor[..., 1:9], lambda _, tensor: tensor.index_select(0, torch.tensor([5, 2, 9]))):
        parts = fill(model, names, shard=shard)
        for name, part in parts.items():
            assert torch.equal(part, shard(name, whole[name].detach()))
            assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
            assert part.requires_grad == whole[name].requires_grad and isinstance(part, nn.Parameter) == isinstance(
                whole[name], nn.Parameter
            )


def test_a_meta_model_needs_its_parts_and_one_whole_tensor() -> None:
    model = on_meta(Stack)
    largest = max(tensor.nbytes for tensor in named_tensors(model).values())
    with LiveBytes() as memory:
        parts = fill(model, shard=rows_of(0, 8))
    held = sum(part.nbytes for part in parts.values())
    assert memory.live == held
    assert memory.peak <= held + largest + 1024


def test_of_a_real_model_only_parts_are_copied() -> None:
    model = Stack()
    with LiveBytes() as memory:
        parts = fill(model, shard=rows_of(0, 8))
    assert memory.peak == sum(part.nbytes for part in parts.values())
