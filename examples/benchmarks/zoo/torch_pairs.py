"""Models that learn from pairs, tasks and tables, and models that make new samples."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Batch, Entry, classes, images
from zoo.torch_other import click_loss, numbers, own


class DeepFM(nn.Module):
    """All pairs of features at once, beside a deep net on the same tables."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(48, 8), nn.Embedding(48, 1)
        self.register_buffer("begin", torch.arange(3) * 16)
        self.deep = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, features: Tensor) -> Tensor:
        at = features + self.begin
        v = self.table(at)
        pairs = 0.5 * (v.sum(dim=1) ** 2 - (v**2).sum(dim=1)).sum(dim=1, keepdim=True)
        return (self.linear(at).sum(dim=1) + pairs + self.deep(v.flatten(1))).squeeze(1)


class CrossNet(nn.Module):
    """Products with the input, layer by layer, and a bag of weighted words per row."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(16, 8, mode="sum")
        self.cross, self.out = nn.ModuleList(nn.Linear(13, 13) for _ in range(2)), nn.Linear(13, 1)

    def forward(self, numbers: Tensor, words: Tensor, weights: Tensor) -> Tensor:
        first = x = torch.cat((numbers, self.bag(words, per_sample_weights=weights)), dim=1)
        for layer in self.cross:
            x = first * layer(x) + x
        return self.out(x).squeeze(1)


class TwoTowers(nn.Module):
    """Users and things; whatever else is in the batch is what was not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(20, 8), nn.Embedding(30, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, user: Tensor, thing: Tensor) -> Tensor:
        u, t = F.normalize(self.users(user), dim=1), F.normalize(self.things(thing), dim=1)
        return F.cross_entropy(u @ t.t() * self.scale.exp(), torch.arange(u.size(0)))


class GatedTasks(nn.Module):
    """Several experts, a gate per task, and a learnt weight for the loss of each."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.gates, self.towers = nn.ModuleList(nn.Linear(8, 3) for _ in range(2)), nn.ModuleList(nn.Linear(8, 1) for _ in range(2))
        self.log_var = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, clicked: Tensor, worth: Tensor) -> Tensor:
        h = torch.stack([expert(x) for expert in self.experts], dim=1)
        a, b = (
            tower((torch.softmax(gate(x), dim=1).unsqueeze(-1) * h).sum(dim=1)).squeeze(1)
            for gate, tower in zip(self.gates, self.towers, strict=True)
        )
        losses = torch.stack((F.binary_cross_entropy_with_logits(a, clicked), F.mse_loss(b, worth)))
        return (losses * torch.exp(-self.log_var) + self.log_var).sum()


class ArcFace(nn.Module):
    """Classes by angle, with a margin for the right one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.centers = nn.Sequential(nn.Linear(8, 16), nn.PReLU()), nn.Parameter(torch.randn(5, 16))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        cos = F.linear(F.normalize(self.body(x)), F.normalize(self.centers)).clamp(-1 + 1e-7, 1 - 1e-7)
        right = F.one_hot(labels, 5).bool()
        return F.cross_entropy(8.0 * torch.where(right, torch.cos(torch.acos(cos) + 0.3), cos), labels)


class HardTriplets(nn.Module):
    """The hardest pairs of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.body(x)
        far = torch.cdist(h, h)
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        hardest = (far * same).max(dim=1).values
        nearest = (far + 1e5 * same).min(dim=1).values
        return F.relu(hardest - nearest + 0.3).mean()


class BarlowTwins(nn.Module):
    """Two views whose features agree one by one and not with each other, over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        a, b = self.body(x), self.body(other)
        a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
        c = a.t() @ b / a.size(0)
        on = (torch.diagonal(c) - 1).pow(2).sum()
        return on + 0.01 * (c.pow(2).sum() - torch.diagonal(c).pow(2).sum())


class VICReg(nn.Module):
    """Alike in pairs, apart over the batch, and no two features the same."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        a, b = self.body(x), self.body(other)
        loss = 25 * F.mse_loss(a, b)
        for z in (a, b):
            loss = loss + 25 * F.relu(1 - torch.sqrt(z.var(dim=0) + 1e-4)).mean()
            z = z - z.mean(dim=0)
            cov = (z.t() @ z) / (z.size(0) - 1)
            loss = loss + (cov - torch.diag(torch.diag(cov))).pow(2).sum() / 6
        return loss


class DINO(nn.Module):
    """A student after a teacher, which stands still in a step; its center follows the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 6), nn.Linear(8, 6).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 6))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.teacher(other)
            target = torch.softmax((seen - self.center) / 0.04, dim=-1)
            self.center.mul_(0.9).add_(0.1 * seen.mean(dim=0, keepdim=True))
        return -(target * F.log_softmax(self.student(x) / 0.1, dim=-1)).sum(dim=-1).mean()


class Rewards(nn.Module):
    """Of two answers the better one is to score higher, beside a reference that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = (nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64)) for _ in range(2))
        self.reference.requires_grad_(False)

    @staticmethod
    def _score(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        said = F.log_softmax(model(ids[:, :-1]), dim=-1).gather(2, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return (said * mask[:, 1:]).sum(dim=1)

    def forward(self, better: Tensor, worse: Tensor, better_mask: Tensor, worse_mask: Tensor) -> Tensor:
        ids, mask = torch.cat((better, worse)), torch.cat((better_mask, worse_mask))
        with torch.no_grad():
            before = self._score(self.reference, ids, mask)
        good, bad = (self._score(self.policy, ids, mask) - before).chunk(2)
        return -F.logsigmoid(0.1 * (good - bad)).mean()


class UNetAttention(nn.Module):
    """The denoiser of a diffusion: times in sines, skips, attention in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.down, self.middle = nn.Linear(8, 16), nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.qkv, self.out = nn.GroupNorm(4, 16), nn.Conv2d(16, 48, 1), nn.Conv2d(16, 16, 1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 3, 3, padding=1)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), dim=0))

    def forward(self, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        kept = self.kept[t][:, None, None, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        angle = t[:, None] * torch.exp(torch.arange(4, dtype=x.dtype) * (-math.log(1e4) / 4))
        skip = F.silu(self.down(noisy))
        h = self.middle(skip) + self.time(torch.cat((angle.sin(), angle.cos()), dim=1))[:, :, None, None]
        q, k, v = self.qkv(self.norm(h)).flatten(2).chunk(3, dim=1)
        h = h + self.out((v @ torch.softmax(k.transpose(1, 2) @ q / 4, dim=1)).view_as(h))
        return F.mse_loss(self.last(torch.cat((self.up(h), skip), dim=1)), noise)


class ConvVAE(nn.Module):
    """A picture, few numbers with a spread, a picture again; what is drawn comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 4, 2, 1), nn.Flatten(), nn.Linear(128, 8))
        self.decode = nn.Sequential(nn.Linear(4, 128), nn.Unflatten(1, (8, 4, 4)), nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU())
        self.last = nn.ConvTranspose2d(8, 3, 4, 2, 1)

    def forward(self, x: Tensor, drawn: Tensor) -> Tensor:
        mean, log_var = self.encode(x).chunk(2, dim=1)
        y = self.last(self.decode(mean + torch.exp(0.5 * log_var) * drawn))
        kl = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
        return (F.binary_cross_entropy_with_logits(y, torch.sigmoid(x), reduction="sum") + kl) / x.size(0)


class Glow(nn.Module):
    """A flow: a scale by channel, an invertible mixing of channels, a coupling."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale, self.shift = nn.Parameter(torch.zeros(1, 4, 1, 1)), nn.Parameter(torch.zeros(1, 4, 1, 1))
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0])
        self.net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.size(2) * x.size(3)
        x = (x + self.shift) * torch.exp(self.log_scale)
        total = self.log_scale.sum() * pixels + torch.linalg.slogdet(self.mix)[1] * pixels
        a, b = F.conv2d(x, self.mix[:, :, None, None]).chunk(2, dim=1)
        scale, shift = self.net(a).chunk(2, dim=1)
        scale = torch.sigmoid(scale + 2)
        z = torch.cat((a, b * scale + shift), dim=1)
        total = total + scale.log().flatten(1).sum(dim=1)
        density = -0.5 * (z**2 + math.log(2 * math.pi)).flatten(1).sum(dim=1)
        return -(density + total).mean() / pixels


class Masked(nn.Linear):
    """A layer that sees only what comes before."""

    def __init__(self, inputs: int, outputs: int, mask: Tensor) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mask", mask.to(self.weight.dtype))

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.mask * self.weight, self.bias)


class MAF(nn.Module):
    """An autoregressive flow by masked layers."""

    def __init__(self) -> None:
        super().__init__()
        order, hidden = torch.arange(8), torch.arange(16) % 7
        self.first = Masked(8, 16, hidden.unsqueeze(1) >= order.unsqueeze(0))
        self.second = Masked(16, 16, (order.unsqueeze(1) > hidden.unsqueeze(0)).repeat(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.second(torch.relu(self.first(x))).chunk(2, dim=1)
        u = (x - mean) * torch.exp(-log)
        return (0.5 * (u**2 + math.log(2 * math.pi)) + log).sum(dim=1).mean()


class PixelCNN(nn.Module):
    """Pixels one after the other, by masked convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 5, padding=2), nn.Conv2d(8, 16, 3, padding=1)
        mask = torch.ones(1, 1, 5, 5)
        mask[..., 2, 2:], mask[..., 3:, :] = 0, 0
        self.register_buffer("mask", mask)
        self.out = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(F.conv2d(x.unsqueeze(1) / 3, self.first.weight * self.mask, self.first.bias, padding=2))
        h = F.conv2d(F.pad(h, (1, 1, 2, 0)), self.second.weight, self.second.bias)[..., : x.size(1), :]
        return F.cross_entropy(self.out(F.relu(h)), x.long())


class Discriminators(nn.Module):
    """Two discriminators at two sizes; the features inside are compared too."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.Conv2d(8, 3, 1))
        self.judge = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3)) for _ in range(2))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        made, loss = self.make(x), 0
        for scale, judge in enumerate(self.judge):
            a, b = (F.avg_pool2d(each, 2**scale) for each in (made, real))
            fa, fb = judge[:2](a), judge[:2](b)
            loss = loss + F.mse_loss(judge[2](fa), torch.ones_like(judge[2](fa))) + F.l1_loss(fa, fb.detach())
        return loss


class EnergyModel(nn.Module):
    """Noise contrastive: what is there against what was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.z = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, drawn: Tensor) -> Tensor:
        ratio = [(-self.energy(each).squeeze(1) - self.z) + 0.5 * each.pow(2).sum(dim=1) for each in (x, drawn)]
        return F.softplus(-ratio[0]).mean() + F.softplus(ratio[1]).mean()


def features(rows: int) -> Batch:
    return {"features": torch.randint(0, 16, (rows, 3)), "real": torch.randint(0, 2, (rows,)).float()}


def weighted_words(rows: int) -> Batch:
    return {
        "numbers": torch.randn(rows, 5),
        "words": torch.randint(0, 16, (rows, 4)),
        "weights": torch.rand(rows, 4),
        "real": torch.randint(0, 2, (rows,)).float(),
    }


def tasks(rows: int) -> Batch:
    return {"x": torch.randn(rows, 8), "clicked": torch.randint(0, 2, (rows,)).float(), "worth": torch.randn(rows)}


def views(rows: int) -> Batch:
    x = torch.randn(rows, 8)
    return {"x": x, "other": x + 0.1 * torch.randn(rows, 8)}


def answers(rows: int) -> Batch:
    mask = (torch.arange(6) < torch.randint(2, 7, (rows, 1))).float()
    return {
        "better": torch.randint(0, 64, (rows, 6)),
        "worse": torch.randint(0, 64, (rows, 6)),
        "better_mask": mask,
        "worse_mask": mask.flip(0),
    }


def noisy(rows: int) -> Batch:
    return {"x": images(rows, 8), "noise": images(rows, 8), "t": torch.randint(0, 100, (rows,))}


def drawn(rows: int) -> Batch:
    return {"x": torch.randn(rows, 8), "drawn": torch.randn(rows, 8)}


ENTRIES = (
    Entry("torch/deepfm", DeepFM, features, click_loss),
    Entry("torch/cross-net", CrossNet, weighted_words, click_loss),
    Entry("torch/two-towers", TwoTowers, lambda rows: {"user": classes(rows, 20), "thing": classes(rows, 30)}, own),
    Entry("torch/gated-tasks", GatedTasks, tasks, own),
    Entry("torch/arcface", ArcFace, numbers, own),
    Entry("torch/hard-triplets", HardTriplets, numbers, own),
    Entry("torch/barlow-twins", BarlowTwins, views, own),
    Entry("torch/vicreg", VICReg, views, own, rate=1e-3),
    Entry("torch/dino", DINO, views, own),
    Entry("torch/dpo", Rewards, answers, own),
    Entry("torch/ddpm-unet", UNetAttention, noisy, own),
    Entry("torch/conv-vae", ConvVAE, lambda rows: {"x": images(rows, 16), "drawn": torch.randn(rows, 4)}, own, rate=1e-4),
    Entry("torch/glow", Glow, lambda rows: {"x": images(rows, 8, 4)}, own),
    Entry("torch/maf", MAF, lambda rows: {"x": torch.randn(rows, 8)}, own),
    Entry("torch/pixel-cnn", PixelCNN, lambda rows: {"x": torch.randint(0, 4, (rows, 8, 8)).float()}, own),
    Entry("torch/two-discriminators", Discriminators, lambda rows: {"x": images(rows, 16), "real": images(rows, 16)}, own),
    Entry("torch/noise-contrastive", EnergyModel, drawn, own),
)
