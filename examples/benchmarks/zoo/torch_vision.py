"""Models of images after torch's own examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Batch, Entry, class_loss, classes, image_classes, images


class MNIST(nn.Module):
    """The network of `mnist`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(16 * 12 * 12, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = torch.flatten(self.dropout1(x), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def nll_loss(output: Tensor, batch: Batch) -> Tensor:
    return F.nll_loss(output, batch["labels"])


class RowsRNN(nn.Module):
    """`mnist_rnn`: an LSTM reads an image line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm = nn.LSTM(28, 16, batch_first=True), nn.BatchNorm1d(16)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x.squeeze(1))
        return F.log_softmax(self.fc(self.norm(output[:, -1, :])), dim=1)


def generator(width: int = 8, noise: int = 12) -> nn.Sequential:
    """The generator of `dcgan`."""
    return nn.Sequential(
        nn.ConvTranspose2d(noise, width * 2, 4, 1, 0, bias=False),
        nn.BatchNorm2d(width * 2),
        nn.ReLU(True),
        nn.ConvTranspose2d(width * 2, width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(True),
        nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator(width: int = 8, norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    """The discriminator of `dcgan`."""
    return nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(width, width * 2, 4, 2, 1, bias=False),
        norm(width * 2),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(width * 2, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )


class AgainstFixed(nn.Module):
    """A generator in training, judged by a discriminator that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = generator(), discriminator().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(self.generator(x))


class Spectral(nn.Module):
    """A discriminator whose weights are divided by their largest singular value."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 4, 4))
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(8 * 4 * 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.last(F.leaky_relu(self.first(x), 0.2).flatten(1))).squeeze(1)


def real_or_fake(rows: int) -> Batch:
    return {"x": images(rows, 16), "real": torch.randint(0, 2, (rows,)).float()}


def real_loss(output: Tensor, batch: Batch) -> Tensor:
    return F.binary_cross_entropy(output, batch["real"])


class VAE(nn.Module):
    """The network of `vae`; the noise comes with the batch, so that it is the same wherever it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mean, self.log = nn.Linear(64, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.fc3, self.fc4 = nn.Linear(8, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x.view(-1, 64)))
        mean, log = self.mean(h), self.log(h)
        z = mean + noise * torch.exp(0.5 * log)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mean, log


def vae_loss(output: Any, batch: Batch) -> Tensor:
    made, mean, log = output
    return F.binary_cross_entropy(made, batch["x"].view(-1, 64), reduction="sum") - 0.5 * torch.sum(1 + log - mean.pow(2) - log.exp())


class VQVAE(nn.Module):
    """A code book with straight-through gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.codes = nn.Conv2d(3, 8, 4, 4), nn.ConvTranspose2d(8, 3, 4, 4), nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, 8)
        index = torch.cdist(flat, self.codes.weight).argmin(dim=1)
        codes = self.codes(index).view_as(z)
        match = F.mse_loss(codes.detach(), z) * 0.25 + F.mse_loss(codes, z.detach())
        made = self.decode((z + (codes - z).detach()).permute(0, 3, 1, 2))
        return F.mse_loss(made, x) + match


class SuperResolution(nn.Module):
    """The network of `super_resolution`."""

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        self.relu, self.shuffle = nn.ReLU(), nn.PixelShuffle(factor)
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 5, 1, 2), nn.Conv2d(8, 8, 3, 1, 1)
        self.conv3, self.conv4 = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, factor**2, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(self.conv4(self.relu(self.conv3(self.relu(self.conv2(self.relu(self.conv1(x))))))))


class StyleNet(nn.Module):
    """The network of `fast_neural_style`: reflection, instance norms, a residual, up again."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm1 = nn.Conv2d(3, 8, 3, 2), nn.InstanceNorm2d(8, affine=True)
        self.inner, self.norm2 = nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, affine=True)
        self.up, self.pad = nn.Conv2d(8, 3, 3), nn.ReflectionPad2d(1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.down(self.pad(x))))
        h = h + self.norm2(self.inner(self.pad(h)))
        return self.up(self.pad(F.interpolate(h, mode="nearest", scale_factor=2)))


class Siamese(nn.Module):
    """The network of `siamese_network`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 7 * 7, 16))
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.head(torch.cat((self.body(first), self.body(second)), 1)).squeeze(1)


class Triplet(nn.Module):
    """One network for an anchor, what is like it and what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, anchor: Tensor, like: Tensor, unlike: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.body(anchor), self.body(like), self.body(unlike)


def triplet_loss(output: Any, batch: Batch) -> Tensor:
    return F.triplet_margin_loss(*output)


class SimCLR(nn.Module):
    """Two views of every image, each told from all others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = F.normalize(self.body(first), dim=1), F.normalize(self.body(second), dim=1)
        scores = a @ b.T / 0.2
        target = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


class ViT(nn.Module):
    """The network of `vision_transformer`."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.zeros(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 17, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat((self.token.expand(h.shape[0], -1, -1), h), dim=1) + self.position
        return self.head(self.layers(h)[:, 0])


class UNet(nn.Module):
    """Down, up, and across, for a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.join, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.enter(x))
        low = F.relu(self.down(F.max_pool2d(high, 2)))
        return self.out(F.relu(self.join(torch.cat((self.up(low), high), dim=1)))).squeeze(1)


def mask_batch(rows: int) -> Batch:
    return {"x": images(rows, 16), "mask": torch.randint(0, 2, (rows, 16, 16)).float()}


def mask_loss(output: Tensor, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, batch["mask"])


def dice_loss(output: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy, and the overlap of all masks of the batch at once."""
    found, mask = torch.sigmoid(output), batch["mask"]
    return mask_loss(output, batch) + 1 - (2 * (found * mask).sum() + 1) / (found.sum() + mask.sum() + 1)


class Detector(nn.Module):
    """One box and a class for every cell of a grid, as YOLO has it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.SiLU(), nn.Conv2d(8, 10, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).permute(0, 2, 3, 1)


def grid_batch(rows: int) -> Batch:
    return {
        "x": images(rows),
        "boxes": torch.rand(rows, 4, 4, 4),
        "there": torch.rand(rows, 4, 4) < 0.4,
        "kinds": torch.randint(0, 5, (rows, 4, 4)),
    }


def grid_loss(output: Tensor, batch: Batch) -> Tensor:
    """Boxes and classes where there is something, whether there is something everywhere."""
    there = batch["there"].to(output.dtype)
    box = (F.smooth_l1_loss(output[..., :4], batch["boxes"], reduction="none").sum(-1) * there).sum() / there.sum()
    kind = (F.cross_entropy(output[..., 5:].permute(0, 3, 1, 2), batch["kinds"], reduction="none") * there).sum() / there.sum()
    return box + kind + F.binary_cross_entropy_with_logits(output[..., 4], there)


class Autoencoder(nn.Module):
    """Convolutions there and back, with group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 3, 2, 1))
        self.decode = nn.Sequential(nn.ConvTranspose2d(4, 8, 2, 2), nn.SiLU(), nn.ConvTranspose2d(8, 3, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def like_input(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch["x"])


def own(output: Tensor, batch: Batch) -> Tensor:
    return output


def pair_batch(rows: int) -> Batch:
    return {"first": images(rows, 16, 1), "second": images(rows, 16, 1), "real": torch.randint(0, 2, (rows,)).float()}


def triplet_batch(rows: int) -> Batch:
    return {name: images(rows, 16, 1) for name in ("anchor", "like", "unlike")}


ENTRIES = (
    Entry("torch/mnist", MNIST, image_classes(28, 1), nll_loss),
    Entry("torch/mnist-rnn", RowsRNN, image_classes(28, 1), nll_loss),
    Entry(
        "torch/dcgan-discriminator",
        discriminator,
        lambda rows: {"input": images(rows, 16), "real": torch.randint(0, 2, (rows,)).float()},
        real_loss,
    ),
    Entry("torch/dcgan-generator", AgainstFixed, lambda rows: {"x": torch.randn(rows, 12, 1, 1), "real": torch.ones(rows)}, real_loss),
    Entry("torch/gan-spectral-norm", Spectral, real_or_fake, real_loss),
    Entry("torch/vae", VAE, lambda rows: {"x": torch.rand(rows, 1, 8, 8), "noise": torch.randn(rows, 8)}, vae_loss, rate=1e-4),
    Entry("torch/vq-vae", VQVAE, lambda rows: {"x": images(rows, 16)}, own),
    Entry(
        "torch/super-resolution",
        SuperResolution,
        lambda rows: {"x": images(rows, 8, 1), "large": images(rows, 16, 1)},
        lambda o, b: F.mse_loss(o, b["large"]),
    ),
    Entry("torch/fast-neural-style", StyleNet, lambda rows: {"x": images(rows, 16)}, like_input),
    Entry("torch/siamese", Siamese, pair_batch, real_loss),
    Entry("torch/triplet", Triplet, triplet_batch, triplet_loss),
    Entry("torch/simclr", SimCLR, lambda rows: {"first": images(rows, 16), "second": images(rows, 16)}, own),
    Entry("torch/vision-transformer", ViT, image_classes(32), class_loss),
    Entry("torch/unet", UNet, mask_batch, mask_loss),
    Entry("torch/unet-dice", UNet, mask_batch, dice_loss),
    Entry("torch/grid-detector", Detector, grid_batch, grid_loss),
    Entry("torch/autoencoder", Autoencoder, lambda rows: {"x": images(rows, 16)}, like_input),
    Entry(
        "torch/label-smoothing",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 5)),
        lambda rows: {"input": images(rows, 8), "labels": classes(rows)},
        lambda o, b: F.cross_entropy(o, b["labels"], label_smoothing=0.1),
    ),
)
