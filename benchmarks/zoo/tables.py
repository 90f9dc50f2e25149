"""Graphs, sets, tables and dynamics as researchers write them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 16


class GraphConvolutions(nn.Module):
    """Messages along edges are summed by `index_add`, normalized by degrees (Kipf and Welling)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        source, target = edges
        degree = x.new_ones(len(x)).index_add(0, target, x.new_ones(len(source)))
        weight = (degree[source] * degree[target]).rsqrt()[:, None]
        for layer in (self.first, self.second):
            x = layer(x)
            x = x / degree[:, None] + torch.zeros_like(x).index_add_(0, target, weight * x[source])
            x = F.relu(x) if layer is self.first else x
        return F.cross_entropy(x, labels)


class GraphAttention(nn.Module):
    """Softmax over the edges of each node by `scatter_reduce` and `scatter_add` (Veličković)."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.project = nn.Linear(8, heads * WIDTH, bias=False)
        self.left, self.right = (nn.Parameter(torch.randn(heads, WIDTH)) for _ in range(2))
        self.out, self.heads = nn.Linear(heads * WIDTH, 4), heads

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        h = self.project(x).view(-1, self.heads, WIDTH)
        score = F.leaky_relu((h * self.left).sum(-1)[source] + (h * self.right).sum(-1)[target])
        at = target[:, None].expand_as(score)
        top = score.new_full((len(x), self.heads), -1e9).scatter_reduce(0, at, score, "amax")
        share = torch.exp(score - top[target])
        total = torch.zeros_like(top).scatter_add(0, at, share)
        share = share / (total[target] + 1e-16)
        y = torch.zeros_like(h)
        y.index_put_((target,), h[source] * share[..., None], accumulate=True)
        return F.cross_entropy(self.out(F.elu(y.flatten(1))), labels)


class Molecules(nn.Module):
    """SchNet: distances in radial bases filter the features of neighbors; energies are pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.filter = nn.Embedding(10, WIDTH), nn.Linear(8, WIDTH)
        self.register_buffer("centers", torch.linspace(0, 4, 8))
        self.update, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, kinds: Tensor, places: Tensor, graph: Tensor, energy: Tensor) -> Tensor:
        apart = torch.cdist(places, places)
        near = (apart < 3) & (graph[:, None] == graph)
        basis = torch.exp(-((apart[..., None] - self.centers) ** 2))
        x = self.embed(kinds)
        message = (self.filter(basis) * x * near[..., None]).sum(1)
        x = self.out(F.softplus(x + self.update(message))).squeeze(-1)
        return F.mse_loss(torch.zeros_like(energy).index_add(0, graph, x), energy)


class Equivariant(nn.Module):
    """E(n) equivariant layers that move places, over all pairs (Satorras et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * WIDTH + 1, WIDTH), nn.SiLU())
        self.node, self.shift = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, h: Tensor, x: Tensor, wanted: Tensor) -> Tensor:
        count = h.shape[1]
        for _ in range(2):
            apart = x[:, :, None] - x[:, None]
            square = apart.pow(2).sum(-1, keepdim=True)
            pairs = [h[:, :, None].expand(-1, -1, count, -1), h[:, None].expand(-1, count, -1, -1)]
            m = self.edge(torch.cat([*pairs, square], -1))
            m = m * (1 - torch.eye(count, dtype=m.dtype, device=m.device))[..., None]
            x = x + (apart * self.shift(m)).mean(2)
            h = h + self.node(torch.cat([h, m.sum(2)], -1))
        return F.mse_loss(x, wanted) + h.square().mean()


class DeepSets(nn.Module):
    """Sets of unequal sizes: sums, means and maxima of what is there (Zaheer et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.whole = nn.Linear(3 * WIDTH, 1)

    def forward(self, x: Tensor, sizes: Tensor, wanted: Tensor) -> Tensor:
        there = (torch.arange(x.shape[1], device=x.device) < sizes[:, None])[..., None]
        y = self.each(x) * there
        total = y.sum(1)
        top = y.masked_fill(~there, -torch.inf).amax(1)
        pooled = torch.cat([total, total / sizes[:, None], top], -1)
        return F.l1_loss(self.whole(pooled).squeeze(-1), wanted)


class PointCloud(nn.Module):
    """PointNet++: farthest points, their nearest neighbors, and maxima (Qi et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        rows = torch.arange(len(points), device=points.device)
        last = torch.zeros(len(points), dtype=torch.long, device=points.device)
        nearest = points.new_full(points.shape[:2], 1e10)
        chosen = []
        for _ in range(4):
            chosen.append(last)
            apart = (points - points[rows, last][:, None]).square().sum(-1)
            nearest = torch.minimum(nearest, apart)
            last = nearest.argmax(-1)
        centers = points[rows[:, None], torch.stack(chosen, 1)]
        index = torch.cdist(centers, points).topk(4, largest=False).indices
        around = points[rows[:, None, None], index]
        y = torch.cat([around - centers[:, :, None], around], -1)
        return F.cross_entropy(self.out(self.net(y).amax((1, 2))), labels)


class NeuralOde(nn.Module):
    """A field integrated by Runge and Kutta's fourth order in fixed steps (Chen et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 4, dtype=x.dtype, device=x.device)
        path = [x]
        for start, end in pairwise(times.unbind()):
            h = end - start
            k1 = self.slope(start, x)
            k2 = self.slope(start + h / 2, x + h / 2 * k1)
            k3 = self.slope(start + h / 2, x + h / 2 * k2)
            k4 = self.slope(end, x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            path.append(x)
        return F.mse_loss(torch.stack(path), wanted)

    def slope(self, time: Tensor, x: Tensor) -> Tensor:
        return self.field(torch.cat([x, time.expand(len(x), 1)], -1))


class Flow(nn.Module):
    """RealNVP: affine couplings and permutations, and the likelihood of data (Dinh et al.)."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3)
        )
        self.rotation = nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0])

    def forward(self, x: Tensor) -> Tensor:
        volume = x.new_zeros(len(x))
        for net in self.nets:
            kept, moved = x.chunk(2, -1)
            scale, shift = net(kept).chunk(2, -1)
            scale = torch.tanh(scale)
            x = torch.cat([moved * scale.exp() + shift, kept], -1) @ self.rotation
            volume = volume + scale.sum(-1) + torch.linalg.slogdet(self.rotation)[1]
        normal = torch.distributions.Normal(0.0, 1.0)
        return -(normal.log_prob(x).sum(-1) + volume).mean()


class Hypernetwork(nn.Module):
    """A network that makes the weights of another for each task (Ha et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4 * 16 + 16 + 16))

    def forward(self, task: Tensor, x: Tensor, wanted: Tensor) -> Tensor:
        first, bias, second = self.hyper(task).split([64, 16, 16], -1)
        y = torch.relu(torch.baddbmm(bias[:, None], x, first.view(-1, 4, 16)))
        return F.mse_loss(torch.bmm(y, second[..., None]).squeeze(-1), wanted)


class WideAndDeep(nn.Module):
    """Crossed features beside a deep network (Cheng et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(64, 1, mode="sum")
        self.tables = nn.ModuleList(nn.Embedding(size, 8) for size in (16, 32, 10))
        self.deep = nn.Sequential(nn.Linear(28, 32), nn.ReLU(), nn.BatchNorm1d(32))
        self.out = nn.Linear(32, 1)

    def forward(self, numbers: Tensor, kinds: Tensor, clicks: Tensor) -> Tensor:
        crossed = (kinds[:, :-1] * 31 + kinds[:, 1:]) % 64
        columns = [table(kinds[:, i]) for i, table in enumerate(self.tables)]
        deep = self.out(self.deep(torch.cat([*columns, torch.log1p(numbers)], -1)))
        scores = (self.wide(crossed) + deep).squeeze(-1)
        return F.binary_cross_entropy_with_logits(scores, clicks)


class FactorizationMachine(nn.Module):
    """DeepFM with one table for all fields by offsets (Guo et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, 16, 48]))
        self.linear, self.embed = nn.Embedding(58, 1), nn.Embedding(58, 8)
        self.deep = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, kinds: Tensor, clicks: Tensor) -> Tensor:
        index = kinds + self.offsets
        v = self.embed(index)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        scores = self.linear(index).sum((1, 2)) + pairs + self.deep(v.flatten(1)).squeeze(1)
        return F.binary_cross_entropy(scores.sigmoid(), clicks)


class TwoTowers(nn.Module):
    """Retrieval with negatives from the batch, corrected by how often they are sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(64, WIDTH), nn.Embedding(64, WIDTH, max_norm=None)
        self.history = nn.EmbeddingBag(64, WIDTH, mode="mean", padding_idx=0)
        self.user = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, user: Tensor, seen: Tensor, item: Tensor, often: Tensor) -> Tensor:
        a = self.user(torch.cat([self.users(user), self.history(seen)], -1))
        scores = a @ self.items(item).mT - often.log()
        same = (item[:, None] == item) & ~torch.eye(len(item), dtype=torch.bool)
        scores = scores.masked_fill(same, torch.finfo(scores.dtype).min)
        return F.cross_entropy(scores, torch.arange(len(item)))


class Interests(nn.Module):
    """DIN: a history attends to the candidate, with masks of lengths (Zhou et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.dice = nn.Embedding(64, WIDTH, padding_idx=0), nn.PReLU()
        self.attend = nn.Sequential(nn.Linear(4 * WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, 1))
        self.out = nn.Linear(3 * WIDTH, 1)

    def forward(self, seen: Tensor, item: Tensor, clicks: Tensor) -> Tensor:
        h, c = self.items(seen), self.items(item)
        many = c[:, None].expand_as(h)
        score = self.attend(torch.cat([h, many, h - many, h * many], -1)).squeeze(-1)
        score = score * (seen != 0)
        interest = torch.einsum("bt,btd->bd", score, h)
        y = self.out(self.dice(torch.cat([interest, c, interest * c], -1))).squeeze(-1)
        return F.binary_cross_entropy_with_logits(y, clicks)


class CrossNetwork(nn.Module):
    """DCN v2 with low rank crosses, gates of tasks, and two losses (Wang et al.; Ma et al.)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.down = nn.ParameterList(torch.randn(4, 24) / 5 for _ in range(2))
        self.up = nn.ParameterList(torch.randn(24, 4) / 2 for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(24, WIDTH) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(24, 3) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

    def forward(self, kinds: Tensor, clicks: Tensor, seconds: Tensor) -> Tensor:
        first = x = self.embed(kinds).flatten(1)
        for down, up in zip(self.down, self.up, strict=True):
            x = first * F.linear(F.linear(x, down), up) + x
        outs = torch.stack([F.relu(expert(x)) for expert in self.experts], 1)
        mixed = [(gate(x).softmax(-1)[..., None] * outs).sum(1) for gate in self.gates]
        click, time = (h(y).squeeze(-1) for h, y in zip(self.heads, mixed, strict=True))
        return F.binary_cross_entropy_with_logits(click, clicks) + F.huber_loss(time, seconds)


class NextItems(nn.Module):
    """SASRec with sampled negatives at each step (Kang and McAuley, 2018)."""

    def __init__(self, length: int = 8) -> None:
        super().__init__()
        self.items = nn.Embedding(64, WIDTH, padding_idx=0)
        self.places = nn.Embedding(length, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, seen: Tensor, after: Tensor, wrong: Tensor) -> Tensor:
        length = seen.shape[1]
        x = self.items(seen) * WIDTH**0.5 + self.places(torch.arange(length))
        x = x * (seen != 0)[..., None]
        mask = ~torch.tril(torch.ones(length, length, dtype=torch.bool))
        x = self.norm(x + self.attention(x, x, x, attn_mask=mask)[0])
        right, other = (x * self.items(after)).sum(-1), (x * self.items(wrong)).sum(-1)
        loss = F.softplus(-right) + F.softplus(other)
        there = after != 0
        return (loss * there).sum() / there.sum()


class Policy(nn.Module):
    """PPO: advantages computed backwards in time, a clipped ratio, a value and an entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, seen: Tensor, done: Tensor, old: Tensor, reward: Tensor) -> Tensor:
        y = self.body(seen)
        value = self.critic(y).squeeze(-1)
        policy = torch.distributions.Categorical(logits=self.actor(y))
        advantages, after = [], torch.zeros_like(value[:, 0])
        with torch.no_grad():
            for t in reversed(range(seen.shape[1] - 1)):
                delta = reward[:, t] + 0.99 * value[:, t + 1] - value[:, t]
                after = delta + 0.95 * 0.99 * after
                advantages.insert(0, after)
        gain = torch.stack(advantages, 1)
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        ratio = (policy.log_prob(done)[:, :-1] - old[:, :-1]).exp()
        best = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return -best.mean() + 0.5 * value.square().mean() - 0.01 * policy.entropy().mean()


class FourierOperator(nn.Module):
    """FNO: complex weights multiply the lowest frequencies of a field (Li et al., 2020)."""

    def __init__(self, modes: int = 4) -> None:
        super().__init__()
        self.lift, self.point = nn.Linear(3, WIDTH), nn.Conv2d(WIDTH, WIDTH, 1)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, modes, modes, 2) / WIDTH)
        self.out, self.modes = nn.Linear(WIDTH, 1), modes

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        m = self.modes
        y = self.lift(x).permute(0, 3, 1, 2)
        spectrum = torch.fft.rfft2(y)
        low = torch.zeros_like(spectrum)
        weight = torch.view_as_complex(self.weight)
        low[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], weight)
        y = F.gelu(torch.fft.irfft2(low, s=y.shape[-2:]) + self.point(y))
        y = self.out(y.permute(0, 2, 3, 1)).squeeze(-1)
        return ((y - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)).mean()


class Tabular(nn.Module):
    """FT-Transformer: each column is a token (Gorishniy et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(6, WIDTH)) for _ in range(2))
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 32, 0.0, "gelu", batch_first=True, norm_first=True
            ),
            num_layers=2,
            enable_nested_tensor=False,
        )
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        tokens = x[..., None] * self.weight + self.bias
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1)
        return F.mse_loss(self.out(self.body(tokens)[:, 0]).squeeze(-1), wanted)


class Variational(nn.Module):
    """A Gaussian latent with given noise, and the divergence by `torch.distributions`."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 16))
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.ELU(), nn.Linear(32, 32))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, -1)
        latent = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        y = self.decode(mean + latent.scale * noise)
        apart = torch.distributions.kl_divergence(latent, prior).sum(-1)
        return (F.binary_cross_entropy_with_logits(y, x, reduction="none").sum(-1) + apart).mean()


class Sinkhorn(nn.Module):
    """Clusters balanced by Sinkhorn's iteration, as in SwAV (Caron et al., 2020)."""

    def __init__(self, clusters: int = 8) -> None:
        super().__init__()
        self.net, self.clusters = nn.Linear(32, WIDTH), nn.Linear(WIDTH, clusters, bias=False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = (self.clusters(F.normalize(self.net(x), dim=1)) for x in (first, second))
        with torch.no_grad():
            q = torch.exp(a / 0.05).T
            q /= q.sum()
            for _ in range(3):
                q /= q.sum(1, keepdim=True) * len(q)
                q /= q.sum(0, keepdim=True) * q.shape[1]
            q = (q * q.shape[1]).T
        return -(q * (b / 0.1).log_softmax(1)).sum(1).mean()
