"""Models of graphs, series, games, tables and points after torch's own examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Batch, Entry, class_loss, classes


class GCN(nn.Module):
    """The network of `gcn`, for a batch of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16, bias=False), nn.Linear(16, 5, bias=False)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        degree = edges.sum(-1).clamp(min=1).rsqrt()
        norm = degree.unsqueeze(-1) * edges * degree.unsqueeze(-2)
        return norm @ self.second(F.relu(norm @ self.first(nodes)))


class WholeGCN(nn.Module):
    """`gcn` as it is: one graph whose nodes are the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16, bias=False), nn.Linear(16, 5, bias=False)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return edges @ self.second(F.relu(edges @ self.first(nodes)))


class GAT(nn.Module):
    """Attention over neighbours, as in `gat`, for a batch of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.source, self.target = nn.Linear(6, 8, bias=False), nn.Linear(8, 1, bias=False), nn.Linear(8, 1, bias=False)
        self.out = nn.Linear(8, 5)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = self.w(nodes)
        scores = F.leaky_relu(self.source(h) + self.target(h).transpose(1, 2), 0.2)
        scores = torch.where(edges > 0, scores, torch.full_like(scores, -9e15))
        return self.out(F.elu(torch.softmax(scores, dim=-1) @ h))


def graphs(rows: int) -> Batch:
    edges = (torch.rand(rows, 7, 7) < 0.4).float()
    return {"nodes": torch.randn(rows, 7, 6), "edges": torch.maximum(edges, torch.eye(7)), "labels": torch.randint(0, 5, (rows, 7))}


def whole_graph(rows: int) -> Batch:
    return {"nodes": torch.randn(rows, 6), "edges": torch.softmax(torch.randn(rows, rows), dim=1), "labels": classes(rows)}


def nodes_loss(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


class Sequence(nn.Module):
    """`time_sequence_prediction`: two cells, step after step, then its own predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        h1, c1, h2, c2 = (torch.zeros(x.size(0), 8, dtype=x.dtype) for _ in range(4))
        for step in x.split(1, dim=1):
            h1, c1 = self.lstm1(step, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            output = self.linear(h2)
            outputs += [output]
        for _ in range(2):
            h1, c1 = self.lstm1(output, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            output = self.linear(h2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


class TCN(nn.Module):
    """Causal dilated convolutions with weight norm."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.convs = nn.ModuleList(norm(nn.Conv1d(1 if i == 0 else 8, 8, 2, dilation=2**i, padding=2**i)) for i in range(3))
        self.out = nn.Conv1d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = x.unsqueeze(1)
        for index, conv in enumerate(self.convs):
            h = F.relu(conv(h)[..., : -(2**index)])
        return self.out(h).squeeze(1)


class WaveNet(nn.Module):
    """Gates and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, 8, 1)
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(2))
        self.out = nn.Conv1d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, skips = self.enter(x.unsqueeze(1)), 0
        for index, gate in enumerate(self.gates):
            value, door = gate(F.pad(h, (2**index, 0))).chunk(2, dim=1)
            h = h + torch.tanh(value) * torch.sigmoid(door)
            skips = skips + h
        return self.out(F.relu(skips)).squeeze(1)


def series(rows: int) -> Batch:
    return {"x": torch.randn(rows, 8), "y": torch.randn(rows, 8)}


def longer_series(rows: int) -> Batch:
    return {"x": torch.randn(rows, 6), "y": torch.randn(rows, 8)}


def like_y(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch["y"])


def root_loss(output: Tensor, batch: Batch) -> Tensor:
    """The root of a mean over all rows."""
    return torch.sqrt(F.mse_loss(output, batch["y"]))


class Policy(nn.Module):
    """The network of `actor_critic`."""

    def __init__(self) -> None:
        super().__init__()
        self.affine, self.action, self.value = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.affine(state))
        return F.log_softmax(self.action(h), dim=-1), self.value(h).squeeze(-1)


def episode(rows: int) -> Batch:
    return {"state": torch.randn(rows, 4), "action": torch.randint(0, 2, (rows,)), "earned": torch.randn(rows)}


def reinforce_loss(output: Any, batch: Batch) -> Tensor:
    chosen = output[0].gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    return (-chosen * batch["earned"]).sum()


def actor_critic_loss(output: Any, batch: Batch) -> Tensor:
    chosen = output[0].gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    return (-chosen * (batch["earned"] - output[1].detach())).sum() + F.smooth_l1_loss(output[1], batch["earned"], reduction="sum")


def normalised_loss(output: Any, batch: Batch) -> Tensor:
    """What was earned is taken relative to the whole batch, as in PPO."""
    earned = (batch["earned"] - batch["earned"].mean()) / (batch["earned"].std() + 1e-8)
    chosen = output[0].gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    return -torch.min(chosen * earned, chosen.clamp(-1, -0.5) * earned).mean()


class DQN(nn.Module):
    """The network in training and the one that it is measured by."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).requires_grad_(False)

    def forward(self, state: Tensor, action: Tensor, earned: Tensor, following: Tensor, ended: Tensor) -> Tensor:
        value = self.network(state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            wanted = earned + 0.9 * self.target(following).max(1).values * (1 - ended)
        return F.smooth_l1_loss(value, wanted)


def steps(rows: int) -> Batch:
    return {**episode(rows), "following": torch.randn(rows, 4), "ended": torch.randint(0, 2, (rows,)).float()}


class DLRM(nn.Module):
    """Tables, a tower, and the products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(16, 8, mode="sum") for _ in range(3))
        self.bottom, self.top = nn.Sequential(nn.Linear(5, 8), nn.ReLU()), nn.Sequential(nn.Linear(14, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        features = torch.stack([dense, *(table(categories[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = features @ features.transpose(1, 2)
        low = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat((dense, products[:, low[0], low[1]]), dim=1)).squeeze(1)


def clicks(rows: int) -> Batch:
    return {"numbers": torch.randn(rows, 5), "categories": torch.randint(0, 16, (rows, 3, 2)), "real": torch.randint(0, 2, (rows,)).float()}


def click_loss(output: Tensor, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, batch["real"], pos_weight=torch.tensor(3.0, dtype=output.dtype))


class Factorization(nn.Module):
    """Users and things, their product and their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(20, 8), nn.Embedding(30, 8)
        self.user_bias, self.thing_bias = nn.Embedding(20, 1), nn.Embedding(30, 1)

    def forward(self, user: Tensor, thing: Tensor) -> Tensor:
        return (self.users(user) * self.things(thing)).sum(1) + self.user_bias(user).squeeze(1) + self.thing_bias(thing).squeeze(1)


class PointNet(nn.Module):
    """Points in any order: shared layers with batch norms, then a maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16)
        self.conv2, self.out = nn.Conv1d(16, 16, 1), nn.Linear(16, 5)

    def forward(self, points: Tensor) -> Tensor:
        return self.out(self.conv2(F.relu(self.norm1(self.conv1(points)))).max(dim=2).values)


class DeepSets(nn.Module):
    """Sets of unlike sizes: a mean of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.rho = nn.Sequential(nn.Linear(3, 16), nn.ReLU()), nn.Linear(16, 5)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        h = self.phi(x) * there.unsqueeze(-1)
        return self.rho(h.sum(1) / there.sum(1, keepdim=True).clamp(min=1))


class NeuralODE(nn.Module):
    """Four steps of Runge and Kutta."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = 0.25
        for _ in range(4):
            k1 = self.f(x)
            k2 = self.f(x + h / 2 * k1)
            k3 = self.f(x + h / 2 * k2)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + self.f(x + h * k3))
        return x


class RealNVP(nn.Module):
    """A flow of two couplings; minus the logarithm of the density."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(x.size(0), dtype=x.dtype)
        for net in self.nets:
            still, moved = x.chunk(2, dim=1)
            scale, shift = net(still).chunk(2, dim=1)
            moved = moved * torch.exp(torch.tanh(scale)) + shift
            total = total + torch.tanh(scale).sum(dim=1)
            x = torch.cat((moved, still), dim=1)
        density = torch.distributions.Normal(torch.zeros((), dtype=x.dtype), torch.ones((), dtype=x.dtype), validate_args=False)
        return -(density.log_prob(x).sum(dim=1) + total).mean()


class MixtureDensity(nn.Module):
    """The parameters of a mixture of normal distributions; minus the logarithm of the likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pi, self.mean, self.log = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        far = (target.unsqueeze(1) - self.mean(h)) / torch.exp(self.log(h))
        return -torch.logsumexp(torch.log_softmax(self.pi(h), dim=1) - self.log(h) - 0.5 * far**2, dim=1).mean()


class Tabular(nn.Module):
    """Columns as tokens, as the FT-Transformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.zeros(8, 16))
        self.layer, self.out = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x.unsqueeze(-1) * self.weight + self.bias).mean(dim=1))


class Experts(nn.Module):
    """A dense mixture: every expert works, the gate weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(8, 4),
            nn.Parameter(torch.randn(4, 8, 16) * 0.2),
            nn.Parameter(torch.randn(4, 16, 5) * 0.2),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(torch.einsum("bi,eij->bej", x, self.up))
        return torch.einsum("bej,ejk,be->bk", h, self.down, torch.softmax(self.gate(x), dim=-1))


class CTCSpeech(nn.Module):
    """DeepSpeech, small: a convolution, a GRU both ways, and CTC with lengths by row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(8, 16, 3, stride=2, padding=1), nn.GRU(16, 8, bidirectional=True, batch_first=True)
        self.out = nn.Linear(16, 10)

    def forward(self, sound: Tensor) -> Tensor:
        h, _ = self.rnn(F.relu(self.conv(sound)).transpose(1, 2))
        return self.out(h).log_softmax(-1)


def speech(rows: int) -> Batch:
    return {
        "sound": torch.randn(rows, 8, 32),
        "said": torch.randint(1, 10, (rows, 5)),
        "lengths": torch.randint(2, 6, (rows,)),
        "frames": torch.full((rows,), 16),
    }


def ctc_loss(output: Tensor, batch: Batch) -> Tensor:
    return F.ctc_loss(output.transpose(0, 1), batch["said"], batch["frames"], batch["lengths"], reduction="sum")


class Tacotron(nn.Module):
    """An attention that moves along the text, frame after frame, fed with what was to be said."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(20, 8), nn.LSTMCell(12, 8)
        self.query, self.place, self.out = nn.Linear(8, 8), nn.Conv1d(1, 8, 3, padding=1), nn.Linear(16, 4)

    def forward(self, text: Tensor, frames: Tensor) -> Tensor:
        memory = self.embed(text)
        state = memory.new_zeros(text.size(0), 8), memory.new_zeros(text.size(0), 8)
        so_far, context, found = memory.new_zeros(text.size(0), text.size(1)), memory.new_zeros(text.size(0), 8), []
        for frame in frames.unbind(dim=1):
            state = self.cell(torch.cat((frame, context), dim=1), state)
            scores = torch.tanh(self.query(state[0]).unsqueeze(1) + memory + self.place(so_far.unsqueeze(1)).transpose(1, 2)).sum(-1)
            weights = torch.softmax(scores, dim=1)
            so_far = so_far + weights
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            found.append(self.out(torch.cat((state[0], context), dim=1)))
        return torch.stack(found, dim=1)


class Jumping(nn.Module):
    """A memory that is written place by place, as in a differentiable stack."""

    def __init__(self) -> None:
        super().__init__()
        self.write, self.out = nn.Linear(8, 8), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.zeros(x.size(0), 4, 8, dtype=x.dtype)
        for place in range(4):
            x = torch.tanh(self.write(x))
            memory[:, place] = x
        return self.out(memory.flatten(1))


def numbers(rows: int) -> Batch:
    return {"x": torch.randn(rows, 8), "labels": classes(rows)}


def own(output: Tensor, batch: Batch) -> Tensor:
    return output


def points(rows: int) -> Batch:
    return {"points": torch.randn(rows, 3, 12), "labels": classes(rows)}


def sets(rows: int) -> Batch:
    there = torch.rand(rows, 6) < 0.6
    return {"x": torch.randn(rows, 6, 3), "there": there.float(), "labels": classes(rows)}


def said(rows: int) -> Batch:
    return {"text": torch.randint(0, 20, (rows, 6)), "frames": torch.randn(rows, 5, 4)}


ENTRIES = (
    Entry("torch/gcn", GCN, graphs, nodes_loss),
    Entry("torch/gcn-one-graph", WholeGCN, whole_graph, class_loss),
    Entry("torch/gat", GAT, graphs, nodes_loss),
    Entry("torch/time-sequence-lstm", Sequence, longer_series, like_y),
    Entry("torch/tcn", TCN, series, like_y),
    Entry("torch/tcn-root-mean-square", TCN, series, root_loss),
    Entry("torch/wavenet", WaveNet, series, like_y),
    Entry("torch/reinforce", Policy, episode, reinforce_loss),
    Entry("torch/actor-critic", Policy, episode, actor_critic_loss),
    Entry("torch/ppo-normalised-advantage", Policy, episode, normalised_loss),
    Entry("torch/dqn", DQN, steps, own),
    Entry("torch/dlrm", DLRM, clicks, click_loss),
    Entry(
        "torch/matrix-factorization",
        Factorization,
        lambda rows: {"user": classes(rows, 20), "thing": classes(rows, 30), "y": torch.randn(rows)},
        like_y,
    ),
    Entry("torch/pointnet", PointNet, points, class_loss),
    Entry("torch/deep-sets", DeepSets, sets, class_loss),
    Entry("torch/neural-ode", NeuralODE, series, like_y),
    Entry("torch/real-nvp", RealNVP, series, own),
    Entry("torch/mixture-density", MixtureDensity, lambda rows: {"x": torch.randn(rows, 8), "target": torch.randn(rows)}, own),
    Entry("torch/tabular-transformer", Tabular, numbers, class_loss),
    Entry("torch/dense-experts", Experts, numbers, class_loss),
    Entry("torch/ctc-speech", CTCSpeech, speech, ctc_loss, rate=1e-3),
    Entry("torch/tacotron", Tacotron, said, lambda o, b: F.l1_loss(o, b["frames"])),
    Entry("torch/written-memory", Jumping, numbers, class_loss),
)
