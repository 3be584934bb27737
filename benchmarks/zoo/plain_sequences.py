"""Plain models of sequences: recurrent cells as loops, torch's own recurrent layers, scans, attention in several forms."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.batches import VOCABULARY, Batch, cross_entropy
from benchmarks.zoo.plain_parts import WIDTH, generator, next_tokens, plain, text, wide
from benchmarks.zoo.registry import ZooModel

LENGTH = 32


class Looped(nn.Module):
    """A recurrent cell in a loop over time, as one writes it by hand."""

    def __init__(self, cell: nn.Module, with_memory: bool) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(VOCABULARY, WIDTH), cell, nn.Linear(WIDTH, VOCABULARY)
        self.with_memory = with_memory

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        state = x.new_zeros(len(x), WIDTH)
        memory, found = state, []
        for t in range(x.shape[1]):
            if self.with_memory:
                state, memory = self.cell(x[:, t], (state, memory))
            else:
                state = self.cell(x[:, t], state)
            found.append(state)
        return self.head(torch.stack(found, 1))


class Layered(nn.Module):
    """A recurrent layer of torch.nn between an embedding and a head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCABULARY, WIDTH), layer
        self.body = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.layer(self.embed(tokens))
        return self.head(self.body(x))


class Scan(nn.Module):
    """A diagonal state-space model with a gate: h' = a h + b x, as a parallel prefix in log2(length) steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.into, self.decay, self.out = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        residual = self.embed(tokens)
        x, gate = self.into(self.norm(residual)).chunk(2, -1)
        a = torch.sigmoid(self.decay(residual))
        h, step = (1 - a) * x, 1
        while step < x.shape[1]:
            h = torch.cat([h[:, :step], h[:, step:] + a[:, step:] * h[:, :-step]], 1)
            a = torch.cat([a[:, :step], a[:, step:] * a[:, :-step]], 1)
            step *= 2
        return self.head(residual + self.out(h * F.silu(gate)))


class Attention(nn.Module):
    """A block of attention and a feed-forward; ``form`` says how attention is computed."""

    def __init__(self, form: str = "fused", heads: int = 4) -> None:
        super().__init__()
        self.form, self.heads = form, heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.body(self.norm2(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.form == "fused":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        if self.form == "linear":  # Katharopoulos et al. 2020, quadratic form
            scores = ((F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-2, -1)) * mask
            return scores @ v / (scores.sum(-1, keepdim=True) + 1e-6)
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, head; ``tied``: one weight for both ends; ``shared``: one block run several times."""

    def __init__(self, form: str = "fused", tied: bool = False, shared: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Attention(form) for _ in range(1 if shared else 2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.times = shared or 1
        nn.init.normal_(self.embed.weight, std=0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


class EncoderDecoder(nn.Module):
    """torch.nn's own Transformer layers; the second half of a window from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.body = nn.Transformer(WIDTH, 4, 1, 1, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        source, target = tokens.chunk(2, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.body(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True))


def second_half(output: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy over the second half of a window."""
    assert batch.target is not None
    return F.cross_entropy(wide(output).flatten(0, 1), batch.target.chunk(2, 1)[1].flatten())


class MemoryNetwork(nn.Module):
    """End-to-end memory: a query reads a memory of facts three times (Sukhbaatar et al. 2015)."""

    def __init__(self, hops: int = 3) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.query, self.next, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 16),
        )
        self.hops = hops

    def forward(self, facts: Tensor, asked: Tensor) -> Tensor:
        keys, values, state = self.key(facts).sum(2), self.value(facts).sum(2), self.query(asked)
        for _ in range(self.hops):
            share = (keys @ state[..., None]).squeeze(-1).div(WIDTH**0.5).softmax(-1)
            state = torch.tanh(self.next(state)) + (share[:, None] @ values).squeeze(1)
        return self.head(state)


def facts(number: int, rows: int = 256, count: int = 8) -> Batch:
    """Facts of a subject and an answer; one subject is asked for."""
    source = generator(number)
    subjects = torch.stack([torch.randperm(16, generator=source)[:count] for _ in range(rows)])
    answers = torch.randint(16, (rows, count), generator=source)
    place = torch.randint(count, (rows, 1), generator=source)
    known = torch.stack([subjects, 16 + answers], -1)
    return Batch((known, subjects.gather(1, place).squeeze(1)), target=answers.gather(1, place).squeeze(1))


class Recognizer(nn.Module):
    """Text on images: convolutions over columns, a GRU cell over time, CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()
        )
        self.squeeze, self.cell, self.head = nn.Linear(32 * 4, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, images: Tensor) -> Tensor:
        columns = self.squeeze(self.convolutions(images).permute(0, 3, 1, 2).flatten(2))
        state, found = columns.new_zeros(len(columns), WIDTH), []
        for t in range(columns.shape[1]):
            state = self.cell(columns[:, t], state)
            found.append(state)
        return self.head(torch.stack(found)).log_softmax(-1)


def lines(number: int, rows: int = 16, letters: int = 4) -> Batch:
    """Letters as fixed patterns of 8 x 8, four in a line."""
    source = generator(number)
    chosen = torch.randint(11, (rows, letters), generator=source)
    patterns = torch.randn(11, 8, 8, generator=generator(9))[chosen]
    images = patterns.permute(0, 2, 1, 3).flatten(2)[:, None]
    return Batch((images + 0.1 * torch.randn(images.shape, generator=source),), target=chosen + 1)


def ctc(output: Tensor, batch: Batch) -> Tensor:
    """CTC over 16 columns and 4 letters."""
    assert batch.target is not None
    rows, letters = batch.target.shape
    return F.ctc_loss(wide(output), batch.target, torch.full((rows,), len(output)), torch.full((rows,), letters))


def _language(name: str, note: str = "", **options: object) -> ZooModel:
    return plain(name, functools.partial(LanguageModel, **options), text, next_tokens, note)  # type: ignore[arg-type]


SKIPPED = "Dynamo skips the function that calls torch.nn.{}, so nothing of it is compiled"
ALLOWED = "the same with `torch._dynamo.config.allow_rnn = True`: Dynamo captures it as a loop over time"
# A cell has a product of as many rows as the batch has.
LOOP = functools.partial(text, rows=32, length=8)

MODELS: tuple[ZooModel, ...] = (
    plain("lstm_cell", lambda: Looped(nn.LSTMCell(WIDTH, WIDTH), True), LOOP, next_tokens),
    plain("gru_cell", lambda: Looped(nn.GRUCell(WIDTH, WIDTH), False), LOOP, next_tokens),
    plain("rnn_cell", lambda: Looped(nn.RNNCell(WIDTH, WIDTH), False), LOOP, next_tokens),
    plain(
        "nn_lstm", lambda: Layered(nn.LSTM(WIDTH, WIDTH, batch_first=True)), text, next_tokens, SKIPPED.format("LSTM")
    ),
    plain(
        "nn_gru", lambda: Layered(nn.GRU(WIDTH, WIDTH, batch_first=True)), text, next_tokens, SKIPPED.format("GRU")
    ),
    plain(
        "nn_lstm_allowed",
        lambda: Layered(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
        LOOP,
        next_tokens,
        ALLOWED,
        allow_rnn=True,
    ),
    plain("ssm_scan", Scan, text, next_tokens),
    _language("decoder"),
    _language("decoder_by_hand", form="plain"),
    _language("linear_attention", form="linear"),
    _language("tied_lm", tied=True),
    _language("universal", "one block, run three times", shared=3),
    plain("nn_transformer", EncoderDecoder, text, second_half),
    plain("memory_network", MemoryNetwork, facts, cross_entropy),
    plain("ocr_ctc", Recognizer, lines, ctc),
)
