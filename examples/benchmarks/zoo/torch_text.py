"""Models of text after torch's own examples and the small codes that people start from."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Batch, Entry, classes, masked_labels, padding_mask, tokens

WORDS, WIDTH = 64, 16


def text_batch(rows: int) -> Batch:
    """Text, and the same text moved by one."""
    text = tokens(rows, 9)
    return {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}


def text_loss(output: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of every next word."""
    return F.cross_entropy(output.reshape(-1, WORDS), batch["y"].reshape(-1))


class RNNModel(nn.Module):
    """The recurrent model of `word_language_model`; its hidden state begins as zeros of as many rows as there are."""

    def __init__(self, kind: type[nn.RNNBase], tied: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.rnn = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)  # type: ignore[call-arg]
        self.decoder = nn.Linear(WIDTH, WORDS)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(self.encoder(x))
        return self.decoder(output)


class OwnState(RNNModel):
    """The same, given its first hidden state."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.zeros(2, x.size(0), WIDTH, dtype=self.encoder.weight.dtype)
        output, _ = self.rnn(self.encoder(x), (first, first))
        return self.decoder(output)


class PositionalEncoding(nn.Module):
    """Sines and cosines, in a buffer."""

    def __init__(self, width: int, longest: int = 32) -> None:
        super().__init__()
        position = torch.arange(longest).unsqueeze(1)
        step = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(longest, width)
        table[:, 0::2], table[:, 1::2] = torch.sin(position * step), torch.cos(position * step)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.size(1)]


class TransformerModel(nn.Module):
    """The transformer of `word_language_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.position = nn.Embedding(WORDS, WIDTH), PositionalEncoding(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=self.encoder.weight.dtype)
        return self.decoder(self.layers(self.position(self.encoder(x) * math.sqrt(WIDTH)), mask=mask))


class LanguageTranslation(nn.Module):
    """The `nn.Transformer` of `language_translation`."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.position = PositionalEncoding(WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 32, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, x: Tensor, padded: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=self.source.weight.dtype)
        read, written = self.position(self.source(source)), self.position(self.target(x))
        found = self.transformer(read, written, tgt_mask=mask, src_key_padding_mask=padded, memory_key_padding_mask=padded)
        return self.generator(found)


def translation_batch(rows: int) -> Batch:
    return {"source": tokens(rows), "padded": padding_mask(rows) == 0, **text_batch(rows)}


class Block(nn.Module):
    """A block of nanoGPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        q, k, v = self.attention(self.first(x)).split(width, dim=2)
        q, k, v = (each.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(rows, length, width))
        return x + self.mlp(self.second(x))


class NanoGPT(nn.Module):
    """nanoGPT: tied tables, its loss in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block(WIDTH, 4) for _ in range(2)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.wte(x) + self.wpe(torch.arange(x.size(1), dtype=torch.long, device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1)


class MinGPTAttention(nn.Module):
    """minGPT's attention, by a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.key, self.query = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        rows, length, width = h.size()
        q, k, v = (layer(h).view(rows, length, 4, width // 4).transpose(1, 2) for layer in (self.query, self.key, self.value))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        return self.head((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(rows, length, width))


class Seq2Seq(nn.Module):
    """An encoder and a decoder of GRU cells with additive attention, word after word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.cell, self.score = nn.GRUCell(3 * WIDTH, 2 * WIDTH), nn.Linear(4 * WIDTH, 1)
        self.out = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, source: Tensor, x: Tensor) -> Tensor:
        memory, last = self.encoder(self.embed(source))
        state, found = torch.cat((last[0], last[1]), dim=1), []
        for step in range(x.size(1)):
            query = state.unsqueeze(1).expand(-1, memory.size(1), -1)
            weights = torch.softmax(self.score(torch.tanh(torch.cat((memory, query), dim=2))), dim=1)
            context = (weights * memory).sum(dim=1)
            state = self.cell(torch.cat((self.embed(x[:, step]), context), dim=1), state)
            found.append(self.out(state))
        return torch.stack(found, dim=1)


class SNLI(nn.Module):
    """Two sentences through one bidirectional LSTM, as in `snli`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.out = nn.Sequential(nn.Linear(4 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 5))

    def _read(self, text: Tensor) -> Tensor:
        _, (last, _) = self.rnn(self.embed(text))
        return last.transpose(0, 1).reshape(text.size(0), -1)

    def forward(self, premise: Tensor, hypothesis: Tensor) -> Tensor:
        return self.out(torch.cat((self._read(premise), self._read(hypothesis)), dim=1))


class TextCNN(nn.Module):
    """Convolutions of several widths over words, then a maximum over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, 8, size) for size in (2, 3, 4))
        self.out = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).transpose(1, 2)
        return self.out(torch.cat([torch.relu(conv(h)).max(dim=2).values for conv in self.convs], dim=1))


class FastText(nn.Module):
    """A bag of words per row."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(WORDS, WIDTH, mode="mean"), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bag(x))


class LastWord(nn.Module):
    """A GRU over padded texts, read out at each text's last word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        output, _ = self.rnn(self.embed(x))
        return self.out(output[torch.arange(x.size(0)), lengths - 1])


class PackedRNN(nn.Module):
    """The same by packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[1][-1])


class Word2Vec(nn.Module):
    """Skip-gram with negative samples."""

    def __init__(self) -> None:
        super().__init__()
        self.center, self.context = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)

    def forward(self, word: Tensor, near: Tensor, far: Tensor) -> Tensor:
        center = self.center(word)
        close = F.logsigmoid((center * self.context(near)).sum(dim=1))
        away = F.logsigmoid(-torch.bmm(self.context(far), center.unsqueeze(2)).squeeze(2)).sum(dim=1)
        return -(close + away).mean()


class LinearAttention(nn.Module):
    """Causal linear attention by cumulative sums over the text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x)).chunk(3, dim=-1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bti,btj->btij", k, v).cumsum(dim=1)
        return self.out(torch.einsum("bti,btij->btj", q, state) / (q * k.cumsum(dim=1)).sum(dim=-1, keepdim=True))


def class_text(rows: int) -> Batch:
    return {"x": tokens(rows), "labels": classes(rows)}


def class_loss(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch["labels"])


def own(output: Any, batch: Batch) -> Any:
    """The loss that the model returns beside its scores, or alone."""
    return output[1] if isinstance(output, tuple) else output


def ignoring_batch(rows: int) -> Batch:
    text = text_batch(rows)
    return {"x": text["x"], "y": masked_labels(text["y"], -1)}


ENTRIES = (
    Entry("torch/word-language-lstm", lambda: RNNModel(nn.LSTM), text_batch, text_loss),
    Entry("torch/word-language-gru", lambda: RNNModel(nn.GRU, tied=True), text_batch, text_loss),
    Entry("torch/word-language-rnn", lambda: RNNModel(nn.RNN), text_batch, text_loss),
    Entry("torch/word-language-own-state", lambda: OwnState(nn.LSTM), text_batch, text_loss),
    Entry("torch/word-language-transformer", TransformerModel, text_batch, text_loss),
    Entry("torch/language-translation", LanguageTranslation, translation_batch, text_loss),
    Entry("torch/nanogpt", NanoGPT, ignoring_batch, own),
    Entry("torch/mingpt", MinGPTAttention, text_batch, text_loss),
    Entry("torch/seq2seq-attention", Seq2Seq, lambda rows: {"source": tokens(rows), **text_batch(rows)}, text_loss),
    Entry("torch/snli", SNLI, lambda rows: {"premise": tokens(rows), "hypothesis": tokens(rows, 6), "labels": classes(rows)}, class_loss),
    Entry("torch/text-cnn", TextCNN, class_text, class_loss),
    Entry("torch/fasttext", FastText, class_text, class_loss),
    Entry("torch/last-word-gru", LastWord, lambda rows: {**class_text(rows), "lengths": torch.randint(1, 9, (rows,))}, class_loss),
    Entry("torch/packed-gru", PackedRNN, lambda rows: {**class_text(rows), "lengths": torch.randint(1, 9, (rows,))}, class_loss),
    Entry(
        "torch/word2vec", Word2Vec, lambda rows: {"word": classes(rows, WORDS), "near": classes(rows, WORDS), "far": tokens(rows, 4)}, own
    ),
    Entry("torch/linear-attention", LinearAttention, text_batch, text_loss),
)
