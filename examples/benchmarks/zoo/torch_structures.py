"""Models of sets, graphs, points, fields and rays, and models that make their own weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Batch, Entry, class_loss, classes, images
from zoo.torch_other import like_y, numbers, own, points


class ScatterGNN(nn.Module):
    """Messages along a list of edges, added up by `scatter_add`, for a batch of graphs of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.message, self.update = nn.Linear(6, 8), nn.Linear(16, 8), nn.GRUCell(8, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = torch.tanh(self.enter(nodes))
        source, target = (each.unsqueeze(-1).expand(-1, -1, 8) for each in (edges[:, 0], edges[:, 1]))
        for _ in range(2):
            message = F.relu(self.message(torch.cat((h.gather(1, source), h.gather(1, target)), dim=-1)))
            heard = torch.zeros_like(h).scatter_add(1, target, message)
            h = self.update(heard.flatten(0, 1), h.flatten(0, 1)).view_as(h)
        return self.out(h.mean(dim=1))


class SharedGraph(nn.Module):
    """One graph that all rows share, in buffers: a series per node, as in models of traffic."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("source", torch.randint(0, 7, (20,)))
        self.register_buffer("target", torch.randint(0, 7, (20,)))
        self.mix, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        heard = torch.zeros_like(h).index_add_(1, self.target, h[:, self.source])
        return self.out(F.relu(h + heard))


class GraphTransformer(nn.Module):
    """Attention with a bias by distance and degree, as the Graphormer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.degree, self.near = nn.Linear(6, 16), nn.Embedding(8, 16), nn.Embedding(4, 4)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 5)

    def forward(self, nodes: Tensor, distance: Tensor) -> Tensor:
        rows, count, _ = nodes.shape
        h = self.enter(nodes) + self.degree((distance == 1).sum(dim=-1))
        q, k, v = (each.view(rows, count, 4, 4).transpose(1, 2) for each in self.qkv(h).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.near(distance).permute(0, 3, 1, 2))
        return self.out((h + y.transpose(1, 2).flatten(2))[:, 0])


class EGNN(nn.Module):
    """Points that move each other, the same however space is turned."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.node = nn.Sequential(nn.Linear(9, 8), nn.SiLU()), nn.Linear(12, 4)
        self.move = nn.Linear(8, 1, bias=False)

    def forward(self, h: Tensor, place: Tensor) -> Tensor:
        count = h.size(1)
        other = ~torch.eye(count, dtype=torch.bool)
        for _ in range(2):
            apart = place.unsqueeze(2) - place.unsqueeze(1)
            far = (apart**2).sum(dim=-1, keepdim=True)
            pairs = torch.cat((h.unsqueeze(2).expand(-1, -1, count, -1), h.unsqueeze(1).expand(-1, count, -1, -1), far), dim=-1)
            message = self.edge(pairs) * other.unsqueeze(-1)
            place = place + (apart * self.move(message)).sum(dim=2) / (count - 1)
            h = h + self.node(torch.cat((h, message.sum(dim=2)), dim=-1))
        return place


class SetTransformer(nn.Module):
    """Attention through a few learnt points, and a learnt question at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.induced, self.seed = nn.Linear(3, 16), nn.Parameter(torch.randn(1, 3, 16)), nn.Parameter(torch.randn(1, 1, 16))
        self.down, self.up, self.pool = (nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor, gone: Tensor) -> Tensor:
        h = self.enter(x)
        few, _ = self.down(self.induced.expand(x.size(0), -1, -1), h, h, key_padding_mask=gone, need_weights=False)
        h = self.norm(h + self.up(h, few, few, need_weights=False)[0])
        found, _ = self.pool(self.seed.expand(x.size(0), -1, -1), h, h, key_padding_mask=gone, need_weights=False)
        return self.out(found.squeeze(1))


class SlotAttention(nn.Module):
    """Slots that compete for what they explain, round after round."""

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.enter = nn.Parameter(torch.randn(1, 3, 8)), nn.Linear(3, 8)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.cell, self.back = nn.GRUCell(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, slots = self.enter(x), self.slots.expand(x.size(0), -1, -1)
        k, v = self.k(h), self.v(h)
        for _ in range(3):
            attention = torch.softmax(k @ self.q(slots).transpose(1, 2), dim=-1) + 1e-8
            weights = attention / attention.sum(dim=1, keepdim=True)
            slots = self.cell((weights.transpose(1, 2) @ v).reshape(-1, 8), slots.reshape(-1, 8)).view_as(slots)
        return attention @ self.back(slots)


class DGCNN(nn.Module):
    """Points and their nearest neighbours, sought anew in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 8), nn.Linear(16, 8), nn.Linear(8, 5)

    def _around(self, x: Tensor, layer: nn.Linear) -> Tensor:
        near = torch.cdist(x, x).topk(4, dim=-1, largest=False).indices
        others = x.unsqueeze(1).expand(-1, x.size(1), -1, -1).gather(2, near.unsqueeze(-1).expand(-1, -1, -1, x.size(-1)))
        own = x.unsqueeze(2).expand_as(others)
        return F.leaky_relu(layer(torch.cat((own, others - own), dim=-1))).max(dim=2).values

    def forward(self, points: Tensor) -> Tensor:
        return self.out(self._around(self._around(points.transpose(1, 2), self.first), self.second).max(dim=1).values)


class FarPoints(nn.Module):
    """Points far from one another, chosen one by one, and what lies near them, as in PointNet++."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.out = nn.Linear(3, 8), nn.Linear(8, 5)

    def forward(self, points: Tensor) -> Tensor:
        x = points.transpose(1, 2)
        far, at = x.new_full(x.shape[:2], 1e10), torch.zeros(x.size(0), dtype=torch.long)
        chosen = []
        for _ in range(3):
            chosen.append(at)
            center = x[torch.arange(x.size(0)), at].unsqueeze(1)
            far = torch.minimum(far, ((x - center) ** 2).sum(-1))
            at = far.argmax(dim=1)
        centers = x.gather(1, torch.stack(chosen, dim=1).unsqueeze(-1).expand(-1, -1, 3))
        apart = x.unsqueeze(1) - centers.unsqueeze(2)
        seen = torch.cdist(centers, x) < 2.0
        h = self.near(apart).masked_fill(~seen.unsqueeze(-1), -1e9).max(dim=2).values
        return self.out(F.relu(h).max(dim=1).values)


class Capsules(nn.Module):
    """Capsules that agree on who is meant, by dynamic routing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weight = nn.Conv2d(3, 16, 9, stride=4), nn.Parameter(torch.randn(1, 144, 5, 6, 4) * 0.1)

    @staticmethod
    def _squash(x: Tensor) -> Tensor:
        square = (x**2).sum(dim=-1, keepdim=True)
        return square / (1 + square) * x / torch.sqrt(square + 1e-8)

    def forward(self, x: Tensor) -> Tensor:
        u = self._squash(self.conv(x).view(x.size(0), 4, -1).transpose(1, 2))
        votes = (self.weight @ u[:, :, None, :, None]).squeeze(-1)
        b = torch.zeros(x.size(0), votes.size(1), 5, 1, dtype=x.dtype)
        for _ in range(3):
            v = self._squash((torch.softmax(b, dim=2) * votes).sum(dim=1, keepdim=True))
            b = b + (votes * v).sum(dim=-1, keepdim=True)
        return v.squeeze(1).norm(dim=-1)


class HyperNetwork(nn.Module):
    """A network whose weights another makes, anew for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4 * 8 + 8 + 8))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        first, bias, second = self.make(task).split((32, 8, 8), dim=1)
        h = torch.tanh(torch.bmm(first.view(-1, 8, 4), x.unsqueeze(-1)).squeeze(-1) + bias)
        return (h * second).sum(dim=1)


class KAN(nn.Module):
    """Learnt splines in the place of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2.2, 2.2, 12))
        self.first, self.second = nn.Parameter(torch.randn(16, 8, 8) * 0.1), nn.Parameter(torch.randn(5, 16, 8) * 0.1)
        self.base = nn.ModuleList((nn.Linear(8, 16), nn.Linear(16, 5)))

    def _splines(self, x: Tensor) -> Tensor:
        x, grid = x.unsqueeze(-1), self.grid
        bases = ((x >= grid[:-1]) & (x < grid[1:])).to(x.dtype)
        for k in range(1, 4):
            left = (x - grid[: -(k + 1)]) / (grid[k:-1] - grid[: -(k + 1)]) * bases[..., :-1]
            right = (grid[k + 1 :] - x) / (grid[k + 1 :] - grid[1:-k]) * bases[..., 1:]
            bases = left + right
        return bases

    def forward(self, x: Tensor) -> Tensor:
        for base, spline in zip(self.base, (self.first, self.second), strict=True):
            x = base(F.silu(x)) + torch.einsum("bik,oik->bo", self._splines(x), spline)
        return x


class NeRF(nn.Module):
    """Rays through a field: places in sines, densities along the ray, colours weighed by what is seen of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.density, self.color = nn.Sequential(nn.Linear(24, 16), nn.ReLU()), nn.Linear(16, 1), nn.Linear(19, 3)

    def forward(self, origin: Tensor, direction: Tensor) -> Tensor:
        t = torch.linspace(0.5, 3.0, 6, dtype=origin.dtype)
        places = origin.unsqueeze(1) + direction.unsqueeze(1) * t[:, None]
        scaled = places.unsqueeze(-1) * (2.0 ** torch.arange(4, dtype=origin.dtype) * math.pi)
        h = self.body(torch.cat((scaled.sin(), scaled.cos()), dim=-1).flatten(2))
        sigma = F.softplus(self.density(h)).squeeze(-1)
        color = torch.sigmoid(self.color(torch.cat((h, direction.unsqueeze(1).expand(-1, 6, -1)), dim=-1)))
        apart = torch.cat((t[1:] - t[:-1], t.new_tensor([1e2])))
        alpha = 1 - torch.exp(-sigma * apart)
        seen = torch.cumprod(torch.cat((torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10), dim=1), dim=1)[:, :-1]
        return ((alpha * seen).unsqueeze(-1) * color).sum(dim=1)


class Fourier(nn.Module):
    """Convolutions by few frequencies with complex weights, as neural operators have them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.local = nn.Linear(3, 6), nn.Linear(6, 1), nn.Conv2d(6, 6, 1)
        self.low, self.high = (nn.Parameter(torch.randn(6, 6, 3, 3, 2) * 0.1) for _ in range(2))

    def forward(self, a: Tensor) -> Tensor:
        rows, height, width = a.shape
        y, x = torch.meshgrid(torch.linspace(0, 1, height, dtype=a.dtype), torch.linspace(0, 1, width, dtype=a.dtype), indexing="ij")
        h = self.enter(torch.stack((a, y.expand(rows, -1, -1), x.expand(rows, -1, -1)), dim=-1)).permute(0, 3, 1, 2)
        spectrum = torch.fft.rfft2(h)
        out = torch.zeros_like(spectrum)
        out[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :3, :3], torch.view_as_complex(self.low))
        out[:, :, -3:, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -3:, :3], torch.view_as_complex(self.high))
        h = F.gelu(torch.fft.irfft2(out, s=(height, width)) + self.local(h))
        return self.leave(h.permute(0, 2, 3, 1)).squeeze(-1)


class Equilibrium(nn.Module):
    """A fixed point, sought without a gradient; one more step has it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.enter, self.out = nn.Linear(16, 16), nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        enter = self.enter(x)
        with torch.no_grad():
            z = torch.zeros_like(enter)
            for _ in range(12):
                z = torch.tanh(0.5 * self.inner(z) + enter)
        return self.out(torch.tanh(0.5 * self.inner(z) + enter))


class DeepONet(nn.Module):
    """A function, by its values at sensors, and where it is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.trunk = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 8))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, u: Tensor, where: Tensor) -> Tensor:
        return torch.einsum("bk,bpk->bp", self.branch(u), self.trunk(where)) + self.bias


class Spatial(nn.Module):
    """Looks at the part of an image that it finds, by a grid of places."""

    def __init__(self) -> None:
        super().__init__()
        self.find, self.conv, self.out = nn.Linear(192, 6), nn.Conv2d(3, 8, 3, stride=2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.find(F.avg_pool2d(x, 4).flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, dtype=x.dtype)
        x = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
        return self.out(F.relu(self.conv(x)).mean(dim=(2, 3)))


class Flow(nn.Module):
    """What moved where between two images: their products at all distances, and the second one warped by it."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.flow = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(9, 2, 3, padding=1)

    def forward(self, x: Tensor, then: Tensor) -> Tensor:
        a, b = self.features(x), F.pad(self.features(then), (1, 1, 1, 1))
        size = a.shape[-1]
        cost = [(a * b[..., i : i + size, j : j + size]).mean(dim=1) for i in range(3) for j in range(3)]
        flow = self.flow(torch.stack(cost, dim=1))
        steps = torch.linspace(-1, 1, size, dtype=x.dtype)
        grid = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), dim=-1)
        warped = F.grid_sample(then, grid + flow.permute(0, 2, 3, 1) * 0.1, align_corners=True, padding_mode="border")
        return (warped - x).abs().mean() + 0.1 * (flow[..., 1:] - flow[..., :-1]).abs().mean()


class Rounding(torch.autograd.Function):
    """Rounds; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Quantised(nn.Module):
    """Weights and activations in few steps, each with a scale that is learnt or kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.step = nn.Linear(8, 16), nn.Linear(16, 5), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.first.weight.detach().abs().amax() / 7
        h = F.relu(F.linear(x, Rounding.apply(self.first.weight / scale) * scale, self.first.bias))
        h = h + (torch.fake_quantize_per_tensor_affine(h.detach(), 0.05, 0, 0, 255) - h.detach())
        return self.second(Rounding.apply(h / self.step).clamp(0, 15) * self.step)


def graph_edges(rows: int) -> Batch:
    return {"nodes": torch.randn(rows, 7, 6), "edges": torch.randint(0, 7, (rows, 2, 12)), "labels": classes(rows)}


def distances(rows: int) -> Batch:
    return {"nodes": torch.randn(rows, 7, 6), "distance": torch.randint(0, 4, (rows, 7, 7)), "labels": classes(rows)}


def bodies(rows: int) -> Batch:
    return {"h": torch.randn(rows, 5, 4), "place": torch.randn(rows, 5, 3), "y": torch.randn(rows, 5, 3)}


def gone_sets(rows: int) -> Batch:
    gone = torch.rand(rows, 6) < 0.4
    gone[:, 0] = False
    return {"x": torch.randn(rows, 6, 3), "gone": gone, "labels": classes(rows)}


def rays(rows: int) -> Batch:
    return {"origin": torch.randn(rows, 3), "direction": F.normalize(torch.randn(rows, 3), dim=1), "y": torch.rand(rows, 3)}


def margin_loss(output: Tensor, batch: Batch) -> Tensor:
    right = F.one_hot(batch["labels"], 5)
    return (right * F.relu(0.9 - output) ** 2 + 0.5 * (1 - right) * F.relu(output - 0.1) ** 2).sum(dim=1).mean()


def pictures(rows: int) -> Batch:
    return {"x": images(rows), "labels": classes(rows)}


ENTRIES = (
    Entry("torch/gnn-scatter", ScatterGNN, graph_edges, class_loss),
    Entry("torch/gnn-shared-graph", SharedGraph, lambda rows: {"x": torch.randn(rows, 7, 4), "y": torch.randn(rows, 7, 4)}, like_y),
    Entry("torch/graphormer", GraphTransformer, distances, class_loss),
    Entry("torch/egnn", EGNN, bodies, like_y, rate=1e-5),
    Entry("torch/set-transformer", SetTransformer, gone_sets, class_loss),
    Entry("torch/slot-attention", SlotAttention, lambda rows: {"x": torch.randn(rows, 6, 3)}, lambda o, b: F.mse_loss(o, b["x"])),
    Entry("torch/dgcnn", DGCNN, points, class_loss),
    Entry("torch/pointnet-farthest", FarPoints, points, class_loss),
    Entry("torch/capsules", Capsules, pictures, margin_loss),
    Entry(
        "torch/hypernetwork",
        HyperNetwork,
        lambda rows: {"x": torch.randn(rows, 4), "task": torch.randn(rows, 4), "y": torch.randn(rows)},
        like_y,
    ),
    Entry("torch/kan", KAN, numbers, class_loss),
    Entry("torch/nerf", NeRF, rays, like_y),
    Entry("torch/fourier-operator", Fourier, lambda rows: {"a": torch.randn(rows, 8, 8), "y": torch.randn(rows, 8, 8)}, like_y),
    Entry("torch/equilibrium", Equilibrium, numbers, class_loss),
    Entry(
        "torch/deep-o-net",
        DeepONet,
        lambda rows: {"u": torch.randn(rows, 8), "where": torch.rand(rows, 5, 1), "y": torch.randn(rows, 5)},
        like_y,
    ),
    Entry("torch/spatial-transformer", Spatial, pictures, class_loss),
    Entry("torch/optical-flow", Flow, lambda rows: {"x": images(rows, 8), "then": images(rows, 8)}, own),
    Entry("torch/quantised", Quantised, numbers, class_loss),
)
