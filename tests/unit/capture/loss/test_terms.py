"""The law of loss terms: sums and weights of uneven pieces give the loss and the gradients of the undivided batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import at_most, slow
from tests.unit.capture.exported import Split, Wrapped, split
from whale.axes import discover
from whale.capture import capture
from whale.errors import CaptureError

torch.set_num_threads(1)

FEATURES, CLASSES, POSITIONS = 4, 5, 3
Loss = Callable[[list[Tensor], Tensor, Tensor, Tensor, Tensor], object]
"""Reads [w, scale, class weights], x, targets in (-1, 0 .. classes - 1), values y, a 0/1 mask."""


def logits(w: list[Tensor], x: Tensor) -> Tensor:
    return x @ w[0]  # [rows, positions, classes]


def flat(w: list[Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return logits(w, x).reshape(-1, CLASSES), t.reshape(-1)


def spread(w: list[Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return logits(w, x).transpose(1, 2), t


def probabilities(y: Tensor) -> Tensor:
    return y.softmax(-1).transpose(1, 2)


def in_place(w: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    loss = logits(w, x).square().sum()
    loss += F.mse_loss(logits(w, x), y)
    loss *= 2
    return loss


def in_place_twice(w: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """What is written is read under both names."""
    loss = logits(w, x).square().sum()
    both = loss.add_(F.mse_loss(logits(w, x), y))
    return both + 2 * loss


def in_place_scaled(w: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The factor is made behind the write."""
    loss = logits(w, x).square().sum()
    loss += F.mse_loss(logits(w, x), y)
    return loss * w[2].exp().mean()


def written(sums: Tensor) -> Tensor:
    sums.view(-1).square_()
    return sums.sum()


EXACT: dict[str, Loss] = {
    "cross entropy, flat": lambda w, x, t, y, m: F.cross_entropy(*flat(w, x, t), ignore_index=-1),
    "cross entropy, ignored 2": lambda w, x, t, y, m: F.cross_entropy(
        logits(w, x).reshape(-1, CLASSES), t.clamp(min=0).reshape(-1), ignore_index=2
    ),
    "cross entropy, spread": lambda w, x, t, y, m: F.cross_entropy(*spread(w, x, t), ignore_index=-1),
    "cross entropy, weights": lambda w, x, t, y, m: F.cross_entropy(*flat(w, x, t), w[2], ignore_index=-1),
    "cross entropy, smoothing": lambda w, x, t, y, m: F.cross_entropy(*spread(w, x, t), ignore_index=-1, label_smoothing=0.2),
    "cross entropy, all": lambda w, x, t, y, m: F.cross_entropy(*spread(w, x, t), w[2], ignore_index=-1, label_smoothing=0.3),
    "cross entropy, sum": lambda w, x, t, y, m: F.cross_entropy(
        *flat(w, x, t), w[2], ignore_index=-1, label_smoothing=0.3, reduction="sum"
    ),
    "cross entropy, probabilities": lambda w, x, t, y, m: F.cross_entropy(spread(w, x, t)[0], probabilities(y)),
    "cross entropy, probabilities, all": lambda w, x, t, y, m: F.cross_entropy(
        spread(w, x, t)[0], probabilities(y), w[2], label_smoothing=0.1
    ),
    "cross entropy, mean of none": lambda w, x, t, y, m: F.cross_entropy(*flat(w, x, t), ignore_index=-1, reduction="none").mean(),
    "nll": lambda w, x, t, y, m: F.nll_loss(F.log_softmax(logits(w, x), -1).transpose(1, 2), t, w[2], ignore_index=-1),
    "mse": lambda w, x, t, y, m: F.mse_loss(logits(w, x), y),
    "mse, broadcast": lambda w, x, t, y, m: torch.ops.aten.mse_loss(logits(w, x), y[:, :1], 1),
    "mse, sum": lambda w, x, t, y, m: F.mse_loss(logits(w, x), y, reduction="sum"),
    "l1": lambda w, x, t, y, m: F.l1_loss(logits(w, x), y),
    "smooth l1": lambda w, x, t, y, m: F.smooth_l1_loss(logits(w, x), y, beta=0.7),
    "huber": lambda w, x, t, y, m: F.huber_loss(logits(w, x), y, delta=0.4),
    "binary": lambda w, x, t, y, m: F.binary_cross_entropy(logits(w, x).sigmoid(), y.sigmoid()),
    "binary, logits": lambda w, x, t, y, m: F.binary_cross_entropy_with_logits(logits(w, x), y.sigmoid(), pos_weight=w[2]),
    "kl": lambda w, x, t, y, m: F.kl_div(logits(w, x).log_softmax(-1), y.softmax(-1)),
    "kl, batchmean": lambda w, x, t, y, m: F.kl_div(
        logits(w, x).log_softmax(-1), y.log_softmax(-1), reduction="batchmean", log_target=True
    ),
    "soft margin": lambda w, x, t, y, m: F.soft_margin_loss(logits(w, x), y.sign()),
    "poisson": lambda w, x, t, y, m: F.poisson_nll_loss(logits(w, x), y.abs()),
    "hinge": lambda w, x, t, y, m: F.hinge_embedding_loss(logits(w, x), y.sign()),
    "cosine": lambda w, x, t, y, m: F.cosine_embedding_loss(logits(w, x)[:, 0], y[:, 0], y[:, 0, 0].sign()),
    "triplet": lambda w, x, t, y, m: F.triplet_margin_loss(logits(w, x)[:, 0], y[:, 0], y[:, 1]),
    "multi margin": lambda w, x, t, y, m: F.multi_margin_loss(logits(w, x)[:, 0], t[:, 0].clamp(min=0)),
    "mean of mean": lambda w, x, t, y, m: logits(w, x).square().mean(-1).mean((0, 1)),
    "mean, dims": lambda w, x, t, y, m: logits(w, x).square().sum((1, 2)).mean(0, keepdim=True).squeeze(),
    "sum": lambda w, x, t, y, m: logits(w, x).square().sum(),
    "sum over rows": lambda w, x, t, y, m: logits(w, x).square().sum() / x.shape[0],
    "sum over elements": lambda w, x, t, y, m: logits(w, x).square().sum() / y.numel(),
    "scaled inside": lambda w, x, t, y, m: (logits(w, x).square() / x.shape[0]).sum(),
    "mean times rows": lambda w, x, t, y, m: logits(w, x).square().mean() * x.shape[0],
    "masked mean": lambda w, x, t, y, m: (logits(w, x).sum(-1).square() * m).sum() / m.sum(),
    "masked mean, bool": lambda w, x, t, y, m: (logits(w, x).sum(-1).square() * (t >= 0)).sum() / (t >= 0).sum(),
    "masked mean, of all": lambda w, x, t, y, m: logits(w, x).square().sum() / torch.ones_like(logits(w, x)).sum(),
    "masked mean, inside": lambda w, x, t, y, m: (logits(w, x).sum(-1).square() * m / m.sum()).sum(),
    "masked mean, of means": lambda w, x, t, y, m: (logits(w, x).square() * m[..., None]).mean() / (2 * m.mean()),
    "masked mean, clamped": lambda w, x, t, y, m: (logits(w, x).sum(-1).square() * m).sum() / m.sum().clamp(min=1.0),
    "masked mean, large clamp": lambda w, x, t, y, m: (logits(w, x).sum(-1).square() * m).sum() / m.sum().clamp(min=100.0),
    "masked mean, epsilon": lambda w, x, t, y, m: (logits(w, x).sum(-1).square() * m).sum() / (m.sum() + 0.5),
    "masked mean, both": lambda w, x, t, y, m: (logits(w, x).sum(-1).square() * m).sum() / (m.sum() + 1e-3).clamp_min(1.0),
    "dot": lambda w, x, t, y, m: torch.dot(logits(w, x)[:, 0, 0], y[:, 0, 0]),
    "regulariser": lambda w, x, t, y, m: F.mse_loss(logits(w, x), y) + 0.1 * w[0].pow(2).sum() - 0.5,
    "two terms": lambda w, x, t, y, m: 0.5 * F.cross_entropy(*flat(w, x, t), ignore_index=-1) - F.l1_loss(logits(w, x), y) / 3,
    "sum of stack": lambda w, x, t, y, m: torch.stack([F.mse_loss(logits(w, x), y), logits(w, x).square().mean() * 2]).sum(),
    "mean of stack": lambda w, x, t, y, m: torch.stack([F.mse_loss(logits(w, x), y), w[0].abs().sum()]).mean(),
    "learned factor": lambda w, x, t, y, m: F.mse_loss(logits(w, x), y) * (-w[1]).exp() + w[1],
    "divided by a parameter": lambda w, x, t, y, m: F.cross_entropy(*flat(w, x, t), ignore_index=-1) / w[1].exp(),
    "in place": lambda w, x, t, y, m: in_place(w, x, y),
    "in place, read twice": lambda w, x, t, y, m: in_place_twice(w, x, y),
    "in place, scaled": lambda w, x, t, y, m: in_place_scaled(w, x, y),
    "negated, one minus": lambda w, x, t, y, m: 1.0 - (-F.mse_loss(logits(w, x), y)).reshape(1).squeeze(),
    "detached addend": lambda w, x, t, y, m: F.mse_loss(logits(w, x), y) + F.l1_loss(logits(w, x), y).detach(),
    "pair": lambda w, x, t, y, m: ((logits(w, x).sum(-1).square() * m).sum(), m.sum()),
    "pair, rows": lambda w, x, t, y, m: (logits(w, x).square().sum(), torch.full((), 1.0, dtype=x.dtype) * x.shape[0]),
    "pair, clamped": lambda w, x, t, y, m: ((logits(w, x).sum(-1).square() * m).sum(), m.sum().clamp(min=1)),
    "pair, large clamp": lambda w, x, t, y, m: (logits(w, x).square().sum(), (t >= 0).sum().clamp(min=100)),
    "pair, epsilon": lambda w, x, t, y, m: ((logits(w, x).sum(-1).square() * m).sum(), m.sum() + 1),
    "pair, both": lambda w, x, t, y, m: ((logits(w, x).sum(-1).square() * m).sum(), (m.sum() + 1e-3).clamp_min(1.0)),
    "pair, a number": lambda w, x, t, y, m: (logits(w, x).square().sum(), x.shape[0] + 1),
    "pair, a tensor of a number": lambda w, x, t, y, m: (logits(w, x).square().sum(), torch.full((), 2 * x.shape[0])),
    "pair, a filled tensor": lambda w, x, t, y, m: (logits(w, x).square().sum(), x.new_full((), x.shape[0])),
    "pair, one of several counts": lambda w, x, t, y, m: (logits(w, x).square().sum(), (t >= 0).sum(0)[0]),
    "masked mean, detached": lambda w, x, t, y, m: logits(w, x).square().sum() / logits(w, x).exp().sum().detach(),
    "pair, read": lambda w, x, t, y, m: (logits(w, x).square().sum(), (t >= 0).sum().item()),
    "sum over all but one": lambda w, x, t, y, m: logits(w, x).square().sum() / (x.shape[0] - 1),
    "sum over pairs": lambda w, x, t, y, m: (logits(w, x).square() / x.shape[0] ** 2).sum(),
    "sum of sums": lambda w, x, t, y, m: logits(w, x).square().sum(0).sum(),
    "mean of sums": lambda w, x, t, y, m: (logits(w, x).square().sum(0) * 2).mean(),
    "sum of means": lambda w, x, t, y, m: logits(w, x).square().mean(0).sum(),
    "sums over rows": lambda w, x, t, y, m: (logits(w, x).square().sum(0) / x.shape[0])[0].sum() - 1,
    "means times rows": lambda w, x, t, y, m: torch.stack([v.mean(0)[0] * x.shape[0] for v in logits(w, x).unbind(2)]).sum(),
    "weighted classes": lambda w, x, t, y, m: (logits(w, x).square().sum((0, 1)) @ w[2]) / 3,
    "trace of a product": lambda w, x, t, y, m: (logits(w, x)[:, 0].T @ y[:, 0]).trace(),
    "product of products": lambda w, x, t, y, m: torch.einsum("bpc,bpc->c", logits(w, x), y).mean(),
    "joined sums": lambda w, x, t, y, m: torch.cat([logits(w, x).sum((0, 1)), y.sum((0, 1))], 0).flip(0).mean(),
    "product of two pairs of dimensions": lambda w, x, t, y, m: torch.tensordot(logits(w, x), y, ([0, 1], [0, 1])).tril().mean(),
    "between sums": lambda w, x, t, y, m: torch.lerp(logits(w, x).sum(0), y.sum(0), 0.3)[0].sum(),
    "pair of a mean and 1": lambda w, x, t, y, m: (F.mse_loss(logits(w, x), y), torch.full((), 1.0, dtype=x.dtype)),
    "pair of a mean and 2": lambda w, x, t, y, m: (F.mse_loss(logits(w, x), y), w[2].sum()),
    "pair, constant": lambda w, x, t, y, m: (logits(w, x).square().sum(), w[2].sum()),
    "mean of selected rows": lambda w, x, t, y, m: F.mse_loss(s := logits(w, x)[m[:, 0] > 0], torch.zeros_like(s)),
    "weights of one number": lambda w, x, t, y, m: (logits(w, x).square().mean((1, 2)) * x.new_full((x.shape[0],), 0.3)).mean(),
    "scattered rows": lambda w, x, t, y, m: torch.zeros(5, dtype=x.dtype).index_add(0, t[:, 0] % 5, logits(w, x)[:, 0, 0]).sum(),
    "sums beside zeros": lambda w, x, t, y, m: torch.addmm(w[0].new_zeros(4, 5), x[:, 0].T, logits(w, x)[:, 0]).trace(),
    "products with constants": lambda w, x, t, y, m: torch.einsum("bpc,dc->d", logits(w, x), w[0]).mean(),
    "complex numbers": lambda w, x, t, y, m: torch.fft.rfft(logits(w, x)).abs().mean(),
}

INEXACT: dict[str, Loss] = {
    "contrastive": lambda w, x, t, y, m: F.cross_entropy(logits(w, x)[:, 0] @ y[:, 0].T, torch.arange(x.shape[0])),
    "mean first": lambda w, x, t, y, m: logits(w, x).mean(0).square().sum(),
    "sum and mean": lambda w, x, t, y, m: (logits(w, x).square().sum(0) + logits(w, x).mean(0)).sum(),
    "product of sums": lambda w, x, t, y, m: torch.einsum("bpc,dpc->c", logits(w, x), y).mean(),
    "written sums": lambda w, x, t, y, m: written(logits(w, x).square().sum(0)),
    "root": lambda w, x, t, y, m: F.mse_loss(logits(w, x), y).sqrt(),
    "broadcast to b x b": lambda w, x, t, y, m: torch.ops.aten.mse_loss(logits(w, x)[:, :1, 0], y[:, 0, 0], 1),
    "pairs of elements": lambda w, x, t, y, m: torch.einsum("i,j->", logits(w, x).reshape(-1), y.reshape(-1)),
    "pairs in a loss": lambda w, x, t, y, m: F.poisson_nll_loss(logits(w, x).reshape(-1, 1), y[:, 0, 0], reduction="sum"),
    "mean over pairs": lambda w, x, t, y, m: F.poisson_nll_loss(logits(w, x).reshape(-1, 1), y[:, 0, 0]),
    "counts of pairs": lambda w, x, t, y, m: (
        torch.zeros(CLASSES, CLASSES, dtype=x.dtype).index_put((t[:, None, 0], t[None, :, 0]), logits(w, x).sum((1, 2)), accumulate=True)
        * torch.arange(CLASSES)[:, None]
    ).sum(),
    "learned divisor": lambda w, x, t, y, m: logits(w, x).square().sum() / logits(w, x).exp().sum(),
    "regulariser over rows": lambda w, x, t, y, m: w[0].square().sum() / x.shape[0],
    "product": lambda w, x, t, y, m: F.mse_loss(logits(w, x), y) * F.l1_loss(logits(w, x), y),
    "bias beside sums": lambda w, x, t, y, m: torch.ops.aten.linear(logits(w, x).sum(0), w[0], bias=w[2][:4]).mean(),
    "constant beside sums": lambda w, x, t, y, m: torch.addmm(w[0], x[:, 0].T, y[:, 0]).mean(),
    "constant joined to sums": lambda w, x, t, y, m: torch.cat([logits(w, x).sum((0, 1)), w[2]]).mean(),
    "sums of rows in turn": lambda w, x, t, y, m: (logits(w, x).sum(0) + logits(w, x).sum((0, 1)).square()).mean(),
    "pair over a mean": lambda w, x, t, y, m: (logits(w, x).square().sum(), m.mean()),
    "pair over a root": lambda w, x, t, y, m: (logits(w, x).square().sum(), m.sum().sqrt()),
    "pair over the largest": lambda w, x, t, y, m: (logits(w, x).square().sum(), m.sum(1).max()),
    "pair over a clamp from above": lambda w, x, t, y, m: (logits(w, x).square().sum(), m.sum().clamp(max=5)),
    "means over all but one": lambda w, x, t, y, m: (logits(w, x).square().mean(0) / (x.shape[0] - 1)).sum(),
    "learned complex divisor": lambda w, x, t, y, m: logits(w, x).square().sum() / torch.complex(logits(w, x), y).abs().sum(),
    "sums over all but one": lambda w, x, t, y, m: (logits(w, x).square().sum(0) / (x.shape[0] - 1)).sum(),
    "pair of a root": lambda w, x, t, y, m: (F.mse_loss(logits(w, x), y, reduction="sum").sqrt(), m.sum()),
}


# sums over rows that depend on one another: an op before the sum is named in place of the term
MIXED: dict[str, Loss] = {
    "contrastive, diagonal": lambda w, x, t, y, m: (logits(w, x)[:, 0] @ y[:, 0].T).softmax(1).diagonal().mean(),
    "sums of differences": lambda w, x, t, y, m: (logits(w, x) - logits(w, x).mean(0)).square().sum(0).sum(),
    "variance": lambda w, x, t, y, m: (logits(w, x) - logits(w, x).mean(0)).square().mean(),
}


def make_batch(num_rows: int, seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, POSITIONS, FEATURES, dtype=torch.float64, generator=random)
    t = torch.randint(-1, CLASSES, (num_rows, POSITIONS), generator=random)
    y = torch.randn(num_rows, POSITIONS, CLASSES, dtype=torch.float64, generator=random)
    m = torch.randint(0, 2, (num_rows, POSITIONS), generator=random).double()
    t[-1, -1], m[-1, -1] = 0, 1.0
    return [x, t, y, m]


def make_weights() -> tuple[list[Tensor], list[Tensor]]:
    random = torch.Generator().manual_seed(1)
    w = torch.randn(FEATURES, CLASSES, dtype=torch.float64, generator=random)
    return [w, torch.tensor(0.3, dtype=torch.float64)], [torch.rand(CLASSES, dtype=torch.float64, generator=random) + 0.5]


_SPLITS: dict[tuple[str, bool], Split] = {}


def the_split(name: str, dynamic: bool = True) -> Split:
    if (name, dynamic) not in _SPLITS:
        parameters, frozen = make_weights()
        loss = {**EXACT, **INEXACT}[name]
        _SPLITS[name, dynamic] = split(loss, parameters, make_batch(7, 0), frozen=frozen, dynamic=dynamic)
    return _SPLITS[name, dynamic]


def loss_and_gradients(found: Split, value: object) -> tuple[Tensor, list[Tensor]]:
    total = value[0] / value[1] if isinstance(value, tuple) else value
    assert isinstance(total, Tensor)
    weights = list(found.model.weights)
    gradients = torch.autograd.grad(total, weights, allow_unused=True)
    return total.detach(), [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    largest = max([1e-3, *(float(value.abs().max()) for value in expected)])
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / largest


def compare(found: Split, batch: Sequence[Tensor], sizes: Sequence[int]) -> tuple[float, float]:
    loss, gradients = loss_and_gradients(found, found.pieces(batch, sizes))
    expected, expected_gradients = loss_and_gradients(found, found.model(*batch))
    return error([loss], [expected]), error(gradients, expected_gradients)


def a_few_are_quick(losses: dict[str, Loss]) -> list[Any]:
    """All names, of which the quick tier takes every sixth."""
    return [name if index % 6 == 0 else slow(name) for index, name in enumerate(losses)]


@pytest.mark.parametrize("name", a_few_are_quick(EXACT))
def test_exact_losses(name: str) -> None:
    found = the_split(name)
    assert [term.reason for term in found.terms] == [""] * len(found.terms)
    for sizes in ((9,), (1, 5, 3)):
        assert max(compare(found, make_batch(9, seed=3), sizes)) < 1e-12


@pytest.mark.slow
@at_most(60)
@given(st.sampled_from(sorted(EXACT)), st.lists(st.integers(1, 6), min_size=2, max_size=5), st.integers(0, 1000))
def test_exact_losses_at_random(name: str, sizes: list[int], seed: int) -> None:
    assert max(compare(the_split(name), make_batch(sum(sizes), seed), sizes)) < 1e-12


@pytest.mark.parametrize("name", a_few_are_quick(INEXACT))
def test_losses_that_are_no_sums(name: str) -> None:
    found = the_split(name)
    assert any(term.reason for term in found.terms)
    assert max(compare(found, make_batch(6, seed=3), (6,))) < 1e-12, "one undivided batch is exact"
    equal = compare(found, make_batch(6, seed=3), (4, 2))
    assert name == "regulariser over rows" or max(equal) > 1e-6


@pytest.mark.parametrize("name", MIXED)
def test_sums_over_rows_that_depend_on_one_another(name: str) -> None:
    parameters, frozen = make_weights()
    model, batch = Wrapped(MIXED[name], parameters, frozen), tuple(make_batch(7, 0))
    graph = capture(model, batch, lambda loss, batch: loss)[0]
    assert all(term.exact for term in graph.loss)
    assert {found.kind for found in discover(graph).mixing} == {"mixes"}


def test_a_returned_sum_that_is_a_mean_is_refused() -> None:
    parameters, frozen = make_weights()
    with pytest.raises(CaptureError, match=r"(?s)is a mean, or does not grow with the rows.*return the mean alone"):
        split(lambda w, x, t, y, m: (F.mse_loss(logits(w, x), y), m.sum()), parameters, make_batch(7, 0), frozen=frozen)


FIXED = (
    "cross entropy, all",
    "mse",
    "kl, batchmean",
    "sum over rows",
    "scaled inside",
    "masked mean",
    "regulariser",
    "sum of sums",
    "sum of means",
    "in place",
    "pair, rows",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXED)
def test_capture_for_one_number_of_rows(name: str) -> None:
    found = the_split(name, dynamic=False)
    assert max(compare(found, make_batch(7, seed=3), (7,))) < 1e-12
    for term in found.terms:
        assert not term.reason or "taken for" in term.reason


def test_new_nodes_carry_the_line_of_the_loss() -> None:
    found = the_split("two terms")
    for term in found.terms:
        assert "in forward" in (term.sum.stack_trace or "")
        assert term.sum.meta["val"].shape == ()


def test_halves_are_summed_in_float32() -> None:
    weight = torch.ones(FEATURES, CLASSES, dtype=torch.float16)
    x = torch.full((64, POSITIONS, FEATURES), 30.0, dtype=torch.float16)
    found = split(lambda w, x: F.mse_loss(x @ w[0], torch.zeros_like(x @ w[0])), [weight], [x])
    assert found.terms[0].sum.meta["val"].dtype == torch.float32
    torch.testing.assert_close(found.pieces([x], (40, 24)).double(), torch.tensor(14400.0).double())


def test_terms_of_a_sum() -> None:
    found = the_split("two terms")
    assert [round(term.coefficient, 9) for term in found.terms] == [0.5, round(-1 / 3, 9)]
    assert all(term.weight is not None for term in found.terms)
    assert the_split("sum").terms[0].weight is None
