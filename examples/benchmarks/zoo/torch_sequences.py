"""Sequence models of other kinds: memories, state spaces, scans, pointers, chains of labels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Batch, Entry, class_loss, classes, tokens
from zoo.torch_text import text_batch, text_loss

WORDS, WIDTH = 64, 16


class TransformerXL(nn.Module):
    """Segment after segment: each attends to what the one before was, without a gradient; places count relative."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)
        self.near = nn.Parameter(torch.randn(8, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        found, memory = [], self.embed(x[:, :0])
        for segment in x.split(4, dim=1):
            h = self.embed(segment)
            q, _, _ = self.qkv(h).chunk(3, dim=-1)
            _, k, v = self.qkv(torch.cat((memory, h), dim=1)).chunk(3, dim=-1)
            length, seen = q.size(1), k.size(1)
            back = (torch.arange(length).unsqueeze(1) + (seen - length)) - torch.arange(seen)
            scores = q @ k.transpose(1, 2) + torch.einsum("bid,ijd->bij", q, self.near[back.clamp(0, 7)])
            scores = scores.masked_fill(back < 0, float("-inf")) / math.sqrt(WIDTH)
            h = h + torch.softmax(scores, dim=-1) @ v
            memory = h.detach()
            found.append(self.out(h))
        return torch.cat(found, dim=1)


class S4D(nn.Module):
    """A diagonal state space as one long convolution, by Fourier transforms; its parameters are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.log_step, self.log_real = nn.Parameter(torch.full((WIDTH,), -2.0)), nn.Parameter(torch.full((WIDTH, 4), math.log(0.5)))
        self.imaginary = nn.Parameter(math.pi * torch.arange(4).repeat(WIDTH, 1).float())
        self.c, self.d = nn.Parameter(torch.randn(WIDTH, 4, 2) * 0.5), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        u = self.embed(x).transpose(1, 2)
        length, step = u.size(-1), torch.exp(self.log_step)
        a = -torch.exp(self.log_real) + 1j * self.imaginary
        scaled = a * step.unsqueeze(-1)
        powers = torch.exp(scaled.unsqueeze(-1) * torch.arange(length))
        c = torch.view_as_complex(self.c) * (torch.exp(scaled) - 1.0) / a
        kernel = 2 * torch.einsum("hn,hnl->hl", c, powers).real
        spectrum = torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length] + u * self.d.unsqueeze(-1)
        return self.out(F.gelu(y).transpose(1, 2))


class SelectiveScan(nn.Module):
    """Mamba's recurrence as a loop over the text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(WORDS, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.dbc, self.a = nn.Linear(WIDTH, 1 + 2 * 4), nn.Parameter(torch.log(torch.arange(1, 5).float()).repeat(WIDTH, 1))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        u = self.embed(x)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.size(1)]).transpose(1, 2)
        delta, b, c = self.dbc(u).split((1, 4, 4), dim=-1)
        delta = F.softplus(delta)
        state, found = u.new_zeros(u.size(0), WIDTH, 4), []
        for t in range(u.size(1)):
            state = torch.exp(delta[:, t, :, None] * -torch.exp(self.a)) * state + (delta[:, t] * u[:, t])[..., None] * b[:, t, None]
            found.append((state * c[:, t, None]).sum(-1))
        return self.out(torch.stack(found, dim=1))


class MinGRU(nn.Module):
    """A recurrence without a loop: a parallel scan in logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.hidden = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        k = self.gate(h)
        log_z, log_keep = -F.softplus(-k), -F.softplus(k)
        held = torch.where(k >= 0, (F.relu(self.hidden(h)) + 0.5).log(), -F.softplus(-self.hidden(h)))
        kept = F.pad(torch.cumsum(log_keep, dim=1), (0, 0, 1, 0))
        values = torch.cat((torch.full_like(h[:, :1], math.log(0.5)), log_z + held), dim=1)
        return self.out(torch.exp(kept + torch.logcumsumexp(values - kept, dim=1))[:, 1:])


class MatrixLSTM(nn.Module):
    """A matrix as memory, with exponential gates held in range, as xLSTM has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.gates = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        k = k / math.sqrt(WIDTH)
        enter, forget = self.gates(h).unbind(dim=-1)
        memory, norm, top = h.new_zeros(h.size(0), WIDTH, WIDTH), h.new_zeros(h.size(0), WIDTH), h.new_zeros(h.size(0))
        found = []
        for t in range(h.size(1)):
            keep = F.logsigmoid(forget[:, t]) + top
            top = torch.maximum(keep, enter[:, t])
            i, f = torch.exp(enter[:, t] - top), torch.exp(keep - top)
            memory = f[:, None, None] * memory + i[:, None, None] * torch.einsum("bi,bj->bij", v[:, t], k[:, t])
            norm = f[:, None] * norm + i[:, None] * k[:, t]
            below = torch.maximum((norm * q[:, t]).sum(-1, keepdim=True).abs(), torch.exp(-top)[:, None])
            found.append(torch.einsum("bij,bj->bi", memory, q[:, t]) / below)
        return self.out(torch.stack(found, dim=1))


class RetNet(nn.Module):
    """Retention: a decay by distance in the place of a softmax; a group norm over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.norm = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.GroupNorm(4, WIDTH)
        self.register_buffer("decay", 1 - 2 ** (-5 - torch.arange(4).float()))
        self.gate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        rows, length = x.shape
        q, k, v = (each.view(rows, length, 4, -1).transpose(1, 2) for each in self.qkv(h).chunk(3, dim=-1))
        back = torch.arange(length).unsqueeze(1) - torch.arange(length)
        weights = torch.tril(self.decay[:, None, None] ** back.clamp(min=0))
        y = ((q @ k.transpose(-1, -2)) * weights) @ v
        y = self.norm(y.transpose(1, 2).reshape(rows * length, WIDTH)).view(rows, length, WIDTH)
        return self.out(F.silu(self.gate(h)) * y)


class MemoryNetwork(nn.Module):
    """Three hops over sentences, their tables shared from hop to hop."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(WORDS, WIDTH, padding_idx=0) for _ in range(4))
        self.place = nn.Parameter(torch.randn(5, WIDTH) * 0.1)

    def forward(self, story: Tensor, question: Tensor) -> Tensor:
        u = self.tables[0](question).sum(dim=1)
        for key, value in zip(self.tables[:-1], self.tables[1:], strict=True):
            m, c = key(story).sum(dim=2) + self.place, value(story).sum(dim=2)
            p = torch.softmax((m * u.unsqueeze(1)).sum(-1), dim=1)
            u = u + (p.unsqueeze(-1) * c).sum(dim=1)
        return u @ self.tables[-1].weight.t()


class TuringMachine(nn.Module):
    """A controller with a memory that it reads and writes by content."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head, self.out = nn.LSTMCell(4 + 6, 16), nn.Linear(16, 6 * 3 + 1), nn.Linear(16 + 6, 4)
        self.first = nn.Parameter(torch.randn(5, 6) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.size(0)
        memory, read = self.first.unsqueeze(0).repeat(rows, 1, 1), x.new_zeros(rows, 6)
        state, found = (x.new_zeros(rows, 16), x.new_zeros(rows, 16)), []
        for t in range(x.size(1)):
            state = self.cell(torch.cat((x[:, t], read), dim=1), state)
            key, erase, add, sharp = self.head(state[0]).split((6, 6, 6, 1), dim=1)
            w = torch.softmax(F.softplus(sharp) * F.cosine_similarity(memory, key.unsqueeze(1), dim=-1), dim=1)
            memory = memory * (1 - torch.einsum("bn,bd->bnd", w, torch.sigmoid(erase))) + torch.einsum("bn,bd->bnd", w, add)
            read = torch.einsum("bn,bnd->bd", w, memory)
            found.append(self.out(torch.cat((state[0], read), dim=1)))
        return torch.stack(found, dim=1)


class PointerNetwork(nn.Module):
    """Points at one of its inputs after the other; what was pointed at is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell = nn.LSTM(2, WIDTH, batch_first=True), nn.LSTMCell(2, WIDTH)
        self.ref, self.query, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, places: Tensor, order: Tensor) -> Tensor:
        memory, (h, c) = self.encoder(places)
        state, step = (h[0], c[0]), places.new_zeros(places.size(0), 2)
        gone, found = torch.zeros_like(order, dtype=torch.bool), []
        for t in range(order.size(1)):
            state = self.cell(step, state)
            scores = self.v(torch.tanh(self.ref(memory) + self.query(state[0]).unsqueeze(1))).squeeze(-1)
            found.append(scores.masked_fill(gone, -1e9))
            at = order[:, t : t + 1]
            gone = gone.scatter(1, at, True)
            step = places.gather(1, at.unsqueeze(-1).expand(-1, 1, 2)).squeeze(1)
        return torch.stack(found, dim=1)


class ChainCRF(nn.Module):
    """A linear chain over an LSTM: the logarithm of all paths less that of the right one; texts end at their mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, 8, bidirectional=True, batch_first=True)
        self.score, self.step = nn.Linear(16, 5), nn.Parameter(torch.randn(5, 5) * 0.1)
        self.begin, self.end = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        scores, _ = self.rnn(self.embed(x))
        scores = self.score(scores)
        all_paths = self.begin + scores[:, 0]
        right = self.begin[tags[:, 0]] + scores[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, x.size(1)):
            further = torch.logsumexp(all_paths.unsqueeze(2) + self.step + scores[:, t].unsqueeze(1), dim=1)
            all_paths = torch.where(mask[:, t : t + 1], further, all_paths)
            own = self.step[tags[:, t - 1], tags[:, t]] + scores[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
            right = right + own * mask[:, t]
        last = tags.gather(1, mask.long().sum(dim=1, keepdim=True) - 1).squeeze(1)
        return (torch.logsumexp(all_paths + self.end, dim=1) - right - self.end[last]).mean()


class Transducer(nn.Module):
    """A recogniser whose loss sums all alignments by a table, row after row."""

    def __init__(self) -> None:
        super().__init__()
        self.sound, self.embed, self.words = nn.GRU(4, 8, batch_first=True), nn.Embedding(6, 8), nn.GRU(8, 8, batch_first=True)
        self.joint = nn.Linear(8, 6)

    def forward(self, sound: Tensor, said: Tensor) -> Tensor:
        f, _ = self.sound(sound)
        g, _ = self.words(F.pad(self.embed(said), (0, 0, 1, 0)))
        scores = F.log_softmax(self.joint(torch.tanh(f.unsqueeze(2) + g.unsqueeze(1))), dim=-1)
        blank = scores[..., 0]
        word = scores[:, :, :-1].gather(3, said[:, None, :, None].expand(-1, f.size(1), -1, 1)).squeeze(-1)
        alpha = F.pad(torch.cumsum(word[:, 0], dim=1), (1, 0))
        for t in range(1, f.size(1)):
            stay = alpha + blank[:, t - 1]
            row = [stay[:, 0]]
            for u in range(1, stay.size(1)):
                row.append(torch.logaddexp(stay[:, u], row[-1] + word[:, t, u - 1]))
            alpha = torch.stack(row, dim=1)
        return -(alpha[:, -1] + blank[:, -1, -1]).mean()


class NBeats(nn.Module):
    """Blocks that each explain a part of the series and hand on what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6)) for _ in range(3))
        t = torch.arange(12) / 8
        self.register_buffer("basis", torch.stack([t**0, t, torch.cos(2 * math.pi * t)]))

    def forward(self, x: Tensor) -> Tensor:
        rest, ahead = x, x.new_zeros(x.size(0), 4)
        for block in self.blocks:
            back, forth = block(rest).chunk(2, dim=1)
            rest, ahead = rest - back @ self.basis[:, :8], ahead + forth @ self.basis[:, 8:]
        return ahead


class ConvLSTM(nn.Module):
    """Frames, one after the other, in a cell of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Conv2d(1 + 4, 16, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, frames: Tensor) -> Tensor:
        rows, _, _, height, width = frames.shape
        h = c = frames.new_zeros(rows, 4, height, width)
        for frame in frames.unbind(dim=1):
            i, f, o, g = self.gates(torch.cat((frame, h), dim=1)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.out(h)


class ShortWords(nn.Module):
    """Speech by its spectrum, made in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.conv, self.out = nn.Conv1d(9, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, sound: Tensor) -> Tensor:
        spectrum = torch.stft(sound, 16, 8, window=self.window, return_complex=True)
        return self.out(F.relu(self.conv(torch.log1p(spectrum.abs()))).mean(dim=2))


class Hashing(nn.Module):
    """Attention inside buckets of alike words, found by sorting, as in the Reformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qk, self.v = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("planes", torch.randn(WIDTH, 2))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        qk, v = self.qk(h), self.v(h)
        turned = qk.detach() @ self.planes
        bucket = torch.cat((turned, -turned), dim=-1).argmax(dim=-1)
        order = torch.argsort(bucket * x.size(1) + torch.arange(x.size(1)), dim=1)
        back = torch.argsort(order, dim=1)
        there = order.unsqueeze(-1).expand(-1, -1, WIDTH)
        q, w = (each.gather(1, there).view(x.size(0), -1, 4, WIDTH) for each in (qk, v))
        scores = torch.softmax(q @ F.normalize(q, dim=-1).transpose(-1, -2), dim=-1)
        y = (scores @ w).reshape(x.size(0), -1, WIDTH)
        return self.out(h + y.gather(1, back.unsqueeze(-1).expand(-1, -1, WIDTH)))


class ManyHeads(nn.Module):
    """Several words ahead at once, all heads and the table one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.adapt = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WORDS, bias=False) for _ in range(3))
        for head in self.heads:
            head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, _ = self.rnn(self.embed(x))
        losses = []
        for ahead, (adapt, head) in enumerate(zip(self.adapt, self.heads, strict=True)):
            scores = head(torch.tanh(adapt(h[:, : h.size(1) - ahead])))
            losses.append(F.cross_entropy(scores.flatten(0, 1), y[:, ahead:].flatten()) / 2**ahead)
        return torch.stack(losses).sum()


def own(output: Tensor, batch: Batch) -> Tensor:
    return output


def stories(rows: int) -> Batch:
    return {"story": torch.randint(0, WORDS, (rows, 5, 4)), "question": tokens(rows, 4), "labels": classes(rows, WORDS)}


def orders(rows: int) -> Batch:
    return {"places": torch.rand(rows, 6, 2), "order": torch.rand(rows, 6).argsort(dim=1)}


def pointing(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), batch["order"])


def tagged(rows: int) -> Batch:
    lengths = torch.randint(2, 9, (rows, 1))
    return {"x": tokens(rows), "tags": torch.randint(0, 5, (rows, 8)), "mask": torch.arange(8) < lengths}


def copying(rows: int) -> Batch:
    x = torch.randn(rows, 5, 4)
    return {"x": x, "y": x.roll(2, dims=1)}


def ahead(rows: int) -> Batch:
    return {"x": torch.randn(rows, 8), "y": torch.randn(rows, 4)}


def frames(rows: int) -> Batch:
    return {"frames": torch.randn(rows, 3, 1, 6, 6), "y": torch.randn(rows, 1, 6, 6)}


def like_y(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch["y"])


ENTRIES = (
    Entry("torch/transformer-xl", TransformerXL, text_batch, text_loss),
    Entry("torch/s4d", S4D, text_batch, text_loss),
    Entry("torch/selective-scan", SelectiveScan, text_batch, text_loss),
    Entry("torch/min-gru", MinGRU, text_batch, text_loss),
    Entry("torch/matrix-lstm", MatrixLSTM, text_batch, text_loss),
    Entry("torch/retnet", RetNet, text_batch, text_loss),
    Entry("torch/memory-network", MemoryNetwork, stories, class_loss),
    Entry("torch/turing-machine", TuringMachine, copying, like_y),
    Entry("torch/pointer-network", PointerNetwork, orders, pointing),
    Entry("torch/lstm-crf", ChainCRF, tagged, own),
    Entry("torch/transducer", Transducer, lambda rows: {"sound": torch.randn(rows, 5, 4), "said": torch.randint(1, 6, (rows, 3))}, own),
    Entry("torch/n-beats", NBeats, ahead, like_y),
    Entry("torch/conv-lstm", ConvLSTM, frames, like_y),
    Entry("torch/spectrum-speech", ShortWords, lambda rows: {"sound": torch.randn(rows, 64), "labels": classes(rows)}, class_loss),
    Entry("torch/reformer", Hashing, text_batch, text_loss),
    Entry("torch/tied-heads", ManyHeads, text_batch, own),
)
