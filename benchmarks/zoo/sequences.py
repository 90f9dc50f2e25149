"""Models of sequences as researchers write them: scans, recurrences, convolutions, experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, STEPS, WIDTH, WORDS = 8, 8, 16, 32


class SelectiveScan(nn.Module):
    """A state space whose matrices depend on the input (Gu and Dao, "Mamba", 2023)."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.project = nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)
        self.parameters_of_step = nn.Linear(WIDTH, WIDTH + 2 * states)
        self.log_decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(WIDTH, 1))
        self.skip = nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(WIDTH, WORDS)
        self.states = states

    def forward(self, ids: Tensor) -> Tensor:
        x, gate = self.project(self.embed(ids)).chunk(2, dim=-1)
        x = F.silu(self.conv(x.mT)[..., : ids.shape[1]].mT)
        delta, b, c = self.parameters_of_step(x).split([WIDTH, self.states, self.states], dim=-1)
        delta = F.softplus(delta)
        decay = torch.exp(-delta[..., None] * self.log_decay.exp())
        drive = delta[..., None] * b[:, :, None] * x[..., None]
        state = x.new_zeros(len(ids), WIDTH, self.states)
        outs = []
        for step in range(ids.shape[1]):
            state = decay[:, step] * state + drive[:, step]
            outs.append(torch.einsum("bds,bs->bd", state, c[:, step]))
        y = (torch.stack(outs, dim=1) + self.skip * x) * F.silu(gate)
        return next_word_loss(self.out(y), ids)


class Retention(nn.Module):
    """Retention in its parallel form (Sun et al., "Retentive Network", 2023)."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.GroupNorm(heads, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)
        self.heads = heads

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        rows, steps, _ = x.shape
        q, k, v = self.qkv(x).view(rows, steps, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        gamma = 1 - 2.0 ** (-5 - torch.arange(self.heads, device=x.device))
        place = torch.arange(steps, device=x.device)
        distance = place[:, None] - place
        decay = torch.where(distance >= 0, gamma[:, None, None] ** distance, 0.0).to(x.dtype)
        y = ((q @ k.mT) * decay @ v).transpose(1, 2).reshape(rows * steps, -1)
        y = self.norm(y).view(rows, steps, -1) * F.silu(self.gate(x))
        return next_word_loss(self.out(y), ids)


class WeightedKeyValue(nn.Module):
    """RWKV's recurrence with running maxima (Peng et al., 2023), with its shift of time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Parameter(torch.rand(3, WIDTH))
        self.key, self.value, self.gate = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.decay, self.first = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        before = F.pad(x, (0, 0, 1, -1))
        mixed = [x * m + before * (1 - m) for m in self.mix]
        k, v, r = self.key(mixed[0]), self.value(mixed[1]), torch.sigmoid(self.gate(mixed[2]))
        a, b = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        top = torch.full_like(a, -1e38)
        outs = []
        for now_k, now_v in zip(k.unbind(1), v.unbind(1), strict=True):
            most = torch.maximum(top, self.first + now_k)
            old, new = torch.exp(top - most), torch.exp(self.first + now_k - most)
            outs.append((old * a + new * now_v) / (old * b + new))
            most = torch.maximum(top - self.decay.exp(), now_k)
            old, new = torch.exp(top - self.decay.exp() - most), torch.exp(now_k - most)
            a, b, top = old * a + new * now_v, old * b + new, most
        return next_word_loss(self.out(r * torch.stack(outs, 1)), ids)


class DeltaRule(nn.Module):
    """Linear attention that overwrites what it knows of a key (Schlag et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.rate, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, v, rate = self.q(x), self.v(x), self.rate(x).sigmoid()
        k = F.normalize(self.k(x), dim=-1)
        memory = torch.zeros(ids.size(0), WIDTH, WIDTH, dtype=x.dtype, device=x.device)
        y = torch.empty_like(x)
        for t in range(ids.size(1)):
            old = torch.einsum("bkv,bk->bv", memory, k[:, t])
            memory = memory + torch.einsum("bk,bv->bkv", k[:, t], rate[:, t] * (v[:, t] - old))
            y[:, t] = torch.einsum("bkv,bk->bv", memory, q[:, t])
        return next_word_loss(self.out(y), ids)


class LinearScan(nn.Module):
    """A diagonal linear recurrence by a doubling scan in logarithmically many steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.gates = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        forget, x = self.gates(self.embed(ids)).chunk(2, -1)
        a = torch.sigmoid(forget)
        x = (1 - a) * x
        step = 1
        while step < ids.shape[1]:
            x = torch.cat([x[:, :step], x[:, step:] + a[:, step:] * x[:, :-step]], 1)
            a = torch.cat([a[:, :step], a[:, step:] * a[:, :-step]], 1)
            step *= 2
        return next_word_loss(self.out(x), ids)


class LongConvolution(nn.Module):
    """A convolution as long as the sequence through the Fourier transform (Poli et al., 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.project = nn.Linear(WIDTH, 2 * WIDTH)
        self.filter = nn.Parameter(torch.randn(WIDTH, STEPS))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        steps = ids.shape[1]
        v, gate = self.project(self.embed(ids)).chunk(2, -1)
        spectrum = torch.fft.rfft(v.mT, n=2 * steps) * torch.fft.rfft(self.filter, n=2 * steps)
        y = torch.fft.irfft(spectrum, n=2 * steps)[..., :steps].mT * gate
        return next_word_loss(self.out(y), ids)


class WaveNet(nn.Module):
    """Causal dilated convolutions with gates and skips (van den Oord et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.gated = nn.ModuleList(
            nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**layer) for layer in range(3)
        )
        self.residual = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3))
        self.skip = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(WIDTH, WORDS, 1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        total = 0.0
        for gated, residual, skip in zip(self.gated, self.residual, self.skip, strict=True):
            filters, gate = gated(F.pad(x, (gated.dilation[0], 0))).chunk(2, 1)
            y = torch.tanh(filters) * torch.sigmoid(gate)
            x, total = x + residual(y), total + skip(y)
        return F.cross_entropy(self.out(total)[..., :-1], ids[:, 1:])


class TemporalConvolutions(nn.Module):
    """Causal residual blocks whose padding is cut off, with weight norm (Bai et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(
                nn.Conv1d(WIDTH, WIDTH, 3, padding=2 * 2**layer, dilation=2**layer)
            )
            for layer in range(2)
        )
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.relu(x + block(x)[:, :, : x.shape[2]])
        return F.cross_entropy(self.out(x[:, :, -1]), labels)


class ConditionalField(nn.Module):
    """A tagger whose loss is a linear chain: the forward algorithm in log space, with lengths."""

    def __init__(self, tags: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.emit = nn.Linear(2 * WIDTH, tags)
        self.transitions = nn.Parameter(torch.randn(tags, tags))
        self.start = nn.Parameter(torch.randn(tags))

    def forward(self, ids: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        scores = self.emit(self.lstm(self.embed(ids))[0])
        rows = torch.arange(len(ids), device=ids.device)
        gold = self.start[tags[:, 0]] + scores[rows, 0, tags[:, 0]]
        alpha = self.start + scores[:, 0]
        for t in range(1, ids.shape[1]):
            step = self.transitions[tags[:, t - 1], tags[:, t]] + scores[rows, t, tags[:, t]]
            gold = gold + step * mask[:, t]
            new = torch.logsumexp(alpha[:, :, None] + self.transitions, 1) + scores[:, t]
            alpha = torch.where(mask[:, t, None], new, alpha)
        return (torch.logsumexp(alpha, 1) - gold).mean()


class Transducer(nn.Module):
    """Speech to text: a joint network over times and labels, summed over all alignments."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.predictor = nn.Embedding(WORDS, WIDTH)
        self.joint = nn.Linear(WIDTH, WORDS)

    def forward(self, audio: Tensor, labels: Tensor) -> Tensor:
        heard, _ = self.encoder(audio)
        said = self.predictor(F.pad(labels, (1, 0)))
        scores = self.joint(torch.tanh(heard[:, :, None] + said[:, None])).log_softmax(-1)
        blank, times, length = scores[..., 0], heard.shape[1], labels.shape[1]
        index = labels[:, None, :, None].expand(-1, times, -1, -1)
        emit = scores[:, :, :-1].gather(-1, index).squeeze(-1)
        alpha = [[blank.new_zeros(len(audio))]]
        for u in range(1, length + 1):
            alpha[0].append(alpha[0][-1] + emit[:, 0, u - 1])
        for t in range(1, times):
            row = [alpha[-1][0] + blank[:, t - 1, 0]]
            for u in range(1, length + 1):
                stay, move = alpha[-1][u] + blank[:, t - 1, u], row[-1] + emit[:, t, u - 1]
                row.append(torch.logaddexp(stay, move))
            alpha.append(row)
        return -(alpha[-1][-1] + blank[:, -1, -1]).mean()


class Connectionist(nn.Module):
    """A recognizer with the loss of connectionist temporal classification."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.rnn = nn.GRU(WIDTH, WIDTH, bidirectional=True)
        self.out = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, audio: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        x = self.conv(audio.mT).permute(2, 0, 1)
        scores = self.out(self.rnn(x)[0]).log_softmax(-1)
        times = torch.full((len(audio),), scores.shape[0], dtype=torch.long)
        return F.ctc_loss(scores, labels, times, lengths, zero_infinity=True)


class TopExperts(nn.Module):
    """A mixture of experts by hand: a loop over experts, `where` and `index_add_`."""

    def __init__(self, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(experts)
        )
        self.out, self.chosen = nn.Linear(WIDTH, WORDS), chosen

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        flat = x.view(-1, WIDTH)
        weights, picked = self.router(flat).softmax(-1).topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(picked == number)
            y.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return next_word_loss(self.out(y.view_as(x) + x), ids)


class CapacityExperts(nn.Module):
    """Experts of fixed capacity: tokens beyond it are dropped (Fedus et al., "Switch", 2021)."""

    def __init__(self, experts: int = 4, capacity: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.router = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 4)
        self.out, self.capacity = nn.Linear(WIDTH, WORDS), capacity

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        share = self.router(x).softmax(-1)
        best, expert = share.max(-1)
        chosen = F.one_hot(expert, len(self.up)).to(x.dtype)
        place = (chosen.cumsum(0) - 1) * chosen
        kept = chosen * (place < self.capacity)
        seat = F.one_hot(place.sum(-1).long().clamp(max=self.capacity - 1), self.capacity)
        dispatch = kept[..., None] * seat[:, None].to(x.dtype)
        tokens = torch.einsum("tec,td->ecd", dispatch, x)
        y = torch.einsum("ecf,efd->ecd", torch.relu(tokens @ self.up), self.down)
        y = torch.einsum("tec,ecd->td", dispatch * best[:, None, None], y)
        balance = (chosen.mean(0) * share.mean(0)).sum() * len(self.up)
        return next_word_loss(self.out(x + y).view(*ids.shape, -1), ids) + 0.01 * balance


class AdditiveAttention(nn.Module):
    """Translation with a recurrent decoder that attends at each step (Bahdanau et al., 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.GRUCell(2 * WIDTH, WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.score, self.out = nn.Linear(WIDTH, 1, bias=False), nn.Linear(2 * WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(ids))
        keys, state, outs = self.key(memory), last[0], []
        for word in self.target(labels).unbind(1):
            scores = self.score(torch.tanh(keys + self.query(state)[:, None])).squeeze(-1)
            scores = scores.masked_fill(ids == 0, -torch.inf)
            context = torch.bmm(scores.softmax(-1)[:, None], memory)[:, 0]
            state = self.cell(torch.cat([word, context], -1), state)
            outs.append(self.out(torch.cat([state, context], -1)))
        return next_word_loss(torch.stack(outs, 1), labels)


class Universal(nn.Module):
    """A transformer layer with shared weights, and a learned time to halt (Dehghani et al.)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
        self.halt, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.embed(ids)
        left, total = x.new_ones(*ids.shape, 1), torch.zeros_like(x)
        for step in range(3):
            x = self.layer(x, src_mask=mask, is_causal=True)
            stops = self.halt(x).sigmoid() if step < 2 else torch.ones_like(left)
            total, left = total + left * stops * x, left * (1 - stops)
        return next_word_loss(self.out(total), ids)


class TransformerOfTorch(nn.Module):
    """`nn.Transformer` with masks of padding and a smoothed loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.net = nn.Transformer(WIDTH, 4, 2, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        before = labels[:, :-1]
        y = self.net(
            self.embed(ids),
            self.embed(before),
            tgt_mask=self.net.generate_square_subsequent_mask(before.shape[1]),
            src_key_padding_mask=ids == 0,
            memory_key_padding_mask=ids == 0,
        )
        scores = self.out(y).flatten(0, 1)
        return F.cross_entropy(scores, labels[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1)


def next_word_loss(scores: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
