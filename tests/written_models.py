"""Models whose forward writes buffers, and views of activations: as their authors write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[["Written", Tensor], Tensor]


class Written(nn.Module):
    """Two layers and some buffers; forward is one of the functions below."""

    def __init__(self, name: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.function = {**BUFFERS, **UNDIVIDED, **ACTIVATIONS}[name]
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("vector", torch.arange(1.0, 5.0, dtype=torch.float64))
        self.register_buffer("spread", torch.ones(4, dtype=torch.float64))
        self.register_buffer("square", torch.zeros(4, 4, dtype=torch.float64))
        self.register_buffer("entries", torch.randn(4, 4, generator=generator, dtype=torch.float64))
        self.register_buffer("load", torch.zeros(4, dtype=torch.long))
        self.register_buffer("total", torch.zeros(3, dtype=torch.complex128))
        self.register_buffer("average", torch.zeros(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def squares(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    return (output - batch[1]).square().mean()


def make_batch(num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, num_rows, 4, generator=generator, dtype=torch.float64)
    return x, y


def build(name: str, num_rows: int) -> tuple[Written, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """A model, an example of its batch, and its loss."""
    return Written(name), make_batch(num_rows, 0), squares


def counter(net: Written, x: Tensor) -> Tensor:
    net.count += 1
    return net.second(net.first(x).tanh() * net.count) / (1 + net.count)


def counter_by_another_name(net: Written, x: Tensor) -> Tensor:
    scale = net.count + 1
    net.count = net.count + 1
    return net.second(net.first(x).tanh() * scale)


def power_iteration(net: Written, x: Tensor) -> Tensor:
    with torch.no_grad():
        for _ in range(2):
            net.vector.copy_(F.normalize(net.second.weight @ net.vector, dim=0))
    return F.linear(net.first(x).tanh(), net.second.weight / (net.vector @ net.second.weight @ net.vector), net.second.bias)


def average_in_place(net: Written, x: Tensor) -> Tensor:
    hidden = net.first(x).tanh() - net.vector
    with torch.no_grad():
        net.vector.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
    return net.second(hidden)


def average_by_another_name(net: Written, x: Tensor) -> Tensor:
    hidden = net.first(x).tanh()
    output = net.second(hidden) + net.vector
    net.vector = 0.8 * net.vector + 0.2 * (hidden.detach().sum(0) / x.shape[0])
    return output


def average_by_lerp(net: Written, x: Tensor) -> Tensor:
    hidden = net.first(x).tanh()
    with torch.no_grad():
        net.square.lerp_((hidden.t() @ hidden) / x.shape[0], 0.3)
        net.vector[:2].lerp_(hidden[:, :2].mean(0), 0.5)
    return net.second(hidden)


def sums(net: Written, x: Tensor) -> Tensor:
    hidden = net.first(x).tanh()
    with torch.no_grad():
        net.load += F.one_hot(hidden.argmax(-1), 4).sum(0)
        net.count += x.shape[0]
        net.square += hidden.t() @ x
        net.vector[0] += hidden.sum()
    return net.second(hidden)


def sums_at_places(net: Written, x: Tensor) -> Tensor:
    hidden = net.first(x).tanh()
    chosen = hidden.argmax(-1)
    with torch.no_grad():
        net.load = net.load + torch.zeros_like(net.load).scatter_add_(0, chosen, torch.ones_like(chosen))
        net.vector.index_add_(0, chosen, hidden[:, 0])
    return net.second(hidden)


def statistics_of_each_row(net: Written, x: Tensor) -> Tensor:
    images = net.first(x)[:, :, None] * torch.arange(1.0, 4.0, dtype=torch.float64)
    return net.second(nn.functional.instance_norm(images, net.vector, net.spread)[:, :, 0])


def complex_numbers(net: Written, x: Tensor) -> Tensor:
    hidden = net.first(x).tanh()
    spectrum = torch.fft.rfft(hidden)
    with torch.no_grad():
        net.total += spectrum.sum(0)
        net.average.lerp_(spectrum.mean(0), 0.2)
        net.vector += hidden.sum(0)
    return net.second(torch.fft.irfft(spectrum * spectrum.conj(), n=4))


def decayed_sums(net: Written, x: Tensor) -> Tensor:
    """The statistics of a codebook: averages of counts, and of sums."""
    hidden = net.first(x).tanh()
    chosen = F.one_hot(hidden.argmax(-1), 4).to(x.dtype)
    with torch.no_grad():
        net.vector.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        net.square.lerp_(chosen.t() @ hidden, 0.2)
    net.spread = 0.8 * net.spread + 0.2 * chosen.sum(0)
    return net.second(hidden)


def codebook(net: Written, x: Tensor) -> Tensor:
    """Rows are replaced by their nearest entries, which are decayed sums of such rows over their decayed, smoothed numbers."""
    hidden = net.first(x).tanh()
    nearest = (hidden[:, None] - net.entries).square().sum(-1).argmin(-1)
    chosen = F.one_hot(nearest, 4).to(x.dtype)
    quantized = hidden + (net.entries[nearest] - hidden).detach()
    with torch.no_grad():
        net.vector.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        net.square.mul_(0.9).add_(chosen.t() @ hidden, alpha=0.1)
        total = net.vector.sum()
        smoothed = (net.vector + 0.1) / (total + 0.4) * total
        net.entries.copy_(net.square / smoothed[:, None])
        net.spread = 0.5 * net.spread + net.entries.norm(dim=1)
    return net.second(quantized)


BUFFERS: dict[str, Forward] = {
    function.__name__: function
    for function in (counter, counter_by_another_name, power_iteration, average_in_place, average_by_another_name, average_by_lerp)
    + (sums, sums_at_places, decayed_sums, codebook, statistics_of_each_row, complex_numbers)
}
"""What is exact however the rows are divided."""


def variance(net: Written, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.vector.lerp_(x.var(0), 0.1)
    return net.second(net.first(x))


def decayed_by_a_tensor(net: Written, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.vector.mul_(net.spread * 0.5).add_(x.sum(0))
    return net.second(net.first(x))


def divided_early(net: Written, x: Tensor) -> Tensor:
    hidden = net.first(x)
    with torch.no_grad():
        net.vector.mul_(0.9).add_(hidden.sum(0))
        net.square.copy_(net.square / net.vector)
        net.vector.mul_(2.0)
    return net.second(hidden)


def read_afterwards(net: Written, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.vector.lerp_(x.mean(0), 0.1)
    return net.second(net.first(x)) * net.vector


def random(net: Written, x: Tensor) -> Tensor:
    net.vector.normal_()
    return net.second(net.first(x)) * net.vector


def rows(net: Written, x: Tensor) -> Tensor:
    net.square[:2] = x[:2]
    return net.second(net.first(x))


def counts_of_pairs(net: Written, x: Tensor) -> Tensor:
    places = (x[:, 0] > 0).long()
    net.square.index_put_((places[:, None], places[None]), x.new_ones(()), accumulate=True)
    return net.second(net.first(x))


UNDIVIDED: dict[str, Forward] = {
    function.__name__: function
    for function in (variance, decayed_by_a_tensor, divided_early, read_afterwards, random, rows, counts_of_pairs)
}
"""What is right for an undivided batch only."""


def recurrence(net: Written, x: Tensor) -> Tensor:
    """Gradients of the second layer reach the loss through writes to columns alone."""
    values, decay, out, state = net.first(x), net.second.bias, torch.zeros_like(x), torch.zeros_like(x[:, 0])
    for column in range(4):
        out[:, column] = state + values[:, column]
        state = state * (-decay[column].exp()).exp() + values[:, column]
    return out + 0 * net.second(out).detach()


def clamped(net: Written, x: Tensor) -> Tensor:
    hidden = net.first(x)
    with torch.no_grad():
        hidden.clamp_(-1.0, 1.0)
    return net.second(hidden) + hidden


def rolled_in_place(net: Written, x: Tensor) -> Tensor:
    hidden = net.first(x)
    shifted = torch.zeros_like(hidden)
    shifted[:, 1:] = hidden[:, :-1].tanh()
    left = shifted[:, :2]
    left *= net.second(x)[:, 2:]
    hidden.data[:, 0] = 0.5
    return shifted + hidden


def prompts_in_some_columns(net: Written, x: Tensor) -> Tensor:
    hidden = net.first(x)
    hidden[:, torch.tensor([1, 3])] = net.second.bias[:2].expand(hidden.shape[0], 2)
    hidden[:, [0]] += net.second.bias[2]
    return net.second(hidden.tanh())


ACTIVATIONS: dict[str, Forward] = {
    function.__name__: function for function in (recurrence, clamped, rolled_in_place, prompts_in_some_columns)
}
