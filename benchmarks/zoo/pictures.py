"""Models of pictures and fields as researchers write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LABELS = 16, 4


class Mixer(nn.Module):
    """Patches mixed by two MLPs (Tolstikhin et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        x = x + self.tokens(self.norm1(x).mT).mT
        x = x + self.channels(self.norm2(x))
        return F.cross_entropy(self.head(x.mean(1)), labels)


class ConvNeXt(nn.Module):
    """Depthwise convolutions with norms over channels and scales of layers (Liu et al., 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.depth = nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.scale = nn.Parameter(1e-2 * torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        x = x + y.permute(0, 3, 1, 2)
        return F.cross_entropy(self.head(x.mean([-2, -1])), labels, label_smoothing=0.1)


class UNet(nn.Module):
    """Segmentation with skips; batch norms, pooling and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = _double(3, 8), _double(8, 16)
        self.bottom = _double(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.left2, self.left1 = _double(32, 16), _double(16, 8)
        self.head = nn.Conv2d(8, LABELS, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        x = self.up2(self.bottom(F.max_pool2d(b, 2)))
        x = self.up1(self.left2(torch.cat([x, b], 1)))
        scores = self.head(self.left1(torch.cat([x, a], 1)))
        share, wanted = scores.softmax(1), F.one_hot(labels, LABELS).movedim(-1, 1)
        both = (share * wanted).sum((0, 2, 3))
        dice = 1 - (2 * both + 1) / ((share + wanted).sum((0, 2, 3)) + 1)
        return F.cross_entropy(scores, labels) + dice.mean()


def _double(into: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
    )


class Denoiser(nn.Module):
    """Diffusion: embeddings of time, group norms that it modulates, attention over places."""

    def __init__(self, steps: int = 20) -> None:
        super().__init__()
        self.register_buffer("alphas", torch.linspace(0.99, 0.1, steps))
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 2 * WIDTH))
        self.stem, self.head = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 3, 3, padding=1)
        self.norm, self.conv = nn.GroupNorm(4, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        alpha = self.alphas[time][:, None, None, None]
        noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        rates = torch.exp(-torch.arange(8, device=x.device) / 2)
        angles = time[:, None] * rates
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], -1)).chunk(2, -1)
        y = self.stem(noisy)
        z = self.norm(y) * (1 + scale[..., None, None]) + shift[..., None, None]
        y = y + self.conv(F.silu(z))
        flat = y.flatten(2).transpose(1, 2)
        flat = flat + self.attention(flat, flat, flat, need_weights=False)[0]
        y = flat.transpose(1, 2).unflatten(2, y.shape[2:])
        return F.mse_loss(self.head(F.interpolate(y, scale_factor=1.0)), noise)


class Capsules(nn.Module):
    """Capsules with dynamic routing and a margin loss (Sabour et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 5, 2)
        self.weight = nn.Parameter(torch.randn(LABELS, 32 * 36 // 8, 8, 8) / 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        small = _squash(self.conv(x).reshape(len(x), -1, 8))
        votes = torch.einsum("bni,cnio->bcno", small, self.weight)
        logits = votes.new_zeros(votes.shape[:3])
        for turn in range(3):
            y = _squash((logits.softmax(1)[..., None] * votes).sum(2))
            if turn < 2:
                logits = logits + (votes * y[:, :, None]).sum(-1)
        length = y.norm(dim=-1)
        wanted = F.one_hot(labels, LABELS)
        loss = wanted * F.relu(0.9 - length) ** 2 + 0.5 * (1 - wanted) * F.relu(length - 0.1) ** 2
        return loss.sum(1).mean()


def _squash(x: Tensor) -> Tensor:
    square = (x**2).sum(-1, keepdim=True)
    return square / (1 + square) * x / (square.sqrt() + 1e-8)


class QuantizedAutoencoder(nn.Module):
    """VQ-VAE: nearest codes, gradients straight through, and a codebook that follows averages."""

    def __init__(self, codes: int = 8) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(3, WIDTH, 4, 4), nn.ConvTranspose2d(WIDTH, 3, 4, 4)
        self.register_buffer("codes", torch.randn(codes, WIDTH))
        self.register_buffer("counts", torch.ones(codes))

    def forward(self, x: Tensor) -> Tensor:
        y = self.encode(x).permute(0, 2, 3, 1)
        flat = y.reshape(-1, WIDTH)
        distance = flat.pow(2).sum(1, True) - 2 * flat @ self.codes.T + self.codes.pow(2).sum(1)
        picked = distance.argmin(1)
        quantized = F.embedding(picked, self.codes).view_as(y)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(picked, len(self.codes)).type_as(flat)
                self.counts.mul_(0.99).add_(hot.sum(0), alpha=0.01)
                self.codes.lerp_(hot.T @ flat / (hot.sum(0)[:, None] + 1e-5), 0.01)
        loss = F.mse_loss(y, quantized.detach())
        quantized = y + (quantized - y).detach()
        return F.mse_loss(self.decode(quantized.permute(0, 3, 1, 2)), x) + 0.25 * loss


class SpectralCritic(nn.Module):
    """A critic with spectral norms, and its penalty of a hinge."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.net = nn.Sequential(
            norm(nn.Conv2d(3, WIDTH, 4, 2, 1)),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            norm(nn.Linear(WIDTH * 64, 1)),
        )

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        return F.relu(1 - self.net(real)).mean() + F.relu(1 + self.net(fake)).mean()


class Radiance(nn.Module):
    """NeRF: encodings of places, an MLP, and volumes rendered along rays (Mildenhall et al.)."""

    def __init__(self, octaves: int = 4, samples: int = 8) -> None:
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(octaves))
        self.register_buffer("depths", torch.linspace(2, 6, samples))
        self.net = nn.Sequential(nn.Linear(3 + 6 * octaves, 32), nn.ReLU(), nn.Linear(32, 32))
        self.density, self.color = nn.Linear(32, 1), nn.Linear(32, 3)

    def forward(self, origins: Tensor, directions: Tensor, colors: Tensor) -> Tensor:
        places = origins[:, None] + directions[:, None] * self.depths[:, None]
        angles = (places[..., None, :] * self.bands[:, None]).flatten(-2)
        y = F.relu(self.net(torch.cat([places, angles.sin(), angles.cos()], -1)))
        sigma, rgb = F.relu(self.density(y)).squeeze(-1), self.color(y).sigmoid()
        gaps = torch.cat([self.depths.diff(), self.depths.new_full((1,), 1e10)])
        alpha = 1 - torch.exp(-sigma * gaps)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha], 1), 1)
        seen = (alpha * through[:, :-1])[..., None] * rgb
        return F.mse_loss(seen.sum(1), colors)


class HashGrid(nn.Module):
    """Instant-NGP: features hashed from corners of cells at several scales (Müller et al.)."""

    def __init__(self, levels: int = 3, entries: int = 64) -> None:
        super().__init__()
        self.tables = nn.Parameter(1e-1 * torch.randn(levels, entries, 2))
        self.net = nn.Sequential(nn.Linear(2 * levels, 16), nn.ReLU(), nn.Linear(16, 3))
        self.register_buffer("primes", torch.tensor([1, 2654435761]))
        self.register_buffer("corners", torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]))

    def forward(self, places: Tensor, colors: Tensor) -> Tensor:
        features = []
        for level, table in enumerate(self.tables):
            scaled = places * 4 * 2**level
            low = scaled.floor().long()
            at = low[:, None] + self.corners
            key = at * self.primes
            index = torch.bitwise_xor(key[..., 0], key[..., 1]) % len(table)
            part = (scaled - low)[:, None]
            weight = torch.where(self.corners.bool(), part, 1 - part).prod(-1)
            features.append((table[index] * weight[..., None]).sum(1))
        return F.mse_loss(self.net(torch.cat(features, -1)), colors)


class Contrast(nn.Module):
    """CLIP: two towers and a symmetric loss over the similarities of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), nn.Flatten(), nn.Linear(256, 32))
        self.words, self.text = nn.EmbeddingBag(32, WIDTH), nn.Linear(WIDTH, 32)
        self.temperature = nn.Parameter(torch.tensor(2.66))

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        a = F.normalize(self.image(images), dim=-1)
        b = F.normalize(self.text(self.words(ids)), dim=-1)
        scores = self.temperature.exp().clamp(max=100) * a @ b.T
        targets = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2


class SelfContrast(nn.Module):
    """SimCLR: views of one picture attract; the diagonal is no negative."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.head = nn.Linear(64, 16)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        z = F.normalize(self.head(self.net(torch.cat([first, second]))), dim=1)
        scores = z @ z.T / 0.5
        scores.fill_diagonal_(-torch.inf)
        return F.cross_entropy(scores, torch.arange(len(z), device=z.device).roll(len(first)))


class RedundancyReduction(nn.Module):
    """Barlow twins: the correlation of features over the batch shall be the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(768, 32))
        self.norm = nn.BatchNorm1d(32, affine=False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        c = self.norm(self.net(first)).T @ self.norm(self.net(second)) / len(first)
        on = torch.diagonal(c).add_(-1).pow_(2).sum()
        off = c.flatten()[:-1].view(31, 33)[:, 1:].flatten().pow(2).sum()
        return on + 0.005 * off


class SpatialTransformer(nn.Module):
    """A network that straightens its input by an affine grid (Jaderberg et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.ReLU(), nn.Linear(32, 6))
        self.head = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.out = nn.Linear(32, LABELS)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        identity = torch.tensor([1.0, 0, 0, 0, 1, 0], dtype=x.dtype, device=x.device)
        theta = (0.1 * self.locate(x) + identity).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.shape, align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        return F.nll_loss(self.out(self.head(x)).log_softmax(-1), labels)


class Windows(nn.Module):
    """Attention within shifted windows with relative biases (Liu et al., "Swin", 2021)."""

    def __init__(self, side: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, WIDTH, 2, 2), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(0.02 * torch.randn((2 * side - 1) ** 2, heads))
        places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"))
        apart = places.flatten(1)[:, :, None] - places.flatten(1)[:, None] + side - 1
        self.register_buffer("index", apart[0] * (2 * side - 1) + apart[1])
        self.head, self.side, self.heads = nn.Linear(WIDTH, LABELS), side, heads

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        rows, high, wide, width = x.shape
        s = self.side
        y = torch.roll(self.norm(x), (-s // 2, -s // 2), (1, 2))
        y = y.view(rows, high // s, s, wide // s, s, width).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(-1, s * s, width)
        q, k, v = self.qkv(y).reshape(len(y), s * s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(s * s, s * s, -1).permute(2, 0, 1)
        y = ((q @ k.mT / 2 + bias).softmax(-1) @ v).transpose(1, 2).reshape(y.shape)
        y = self.proj(y).view(rows, high // s, wide // s, s, s, width).permute(0, 1, 3, 2, 4, 5)
        y = torch.roll(y.reshape(rows, high, wide, width), (s // 2, s // 2), (1, 2))
        return F.cross_entropy(self.head((x + y).mean((1, 2))), labels)


class MaskedAutoencoder(nn.Module):
    """Patches are shuffled, three in four hidden and predicted (He et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(48, WIDTH), nn.Parameter(torch.randn(1, 16, WIDTH))
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
        self.hidden, self.head = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Linear(WIDTH, 48)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        patches = F.unfold(x, 4, stride=4).mT
        rows, count, _ = patches.shape
        order = noise.argsort(1)
        back, kept = order.argsort(1), order[:, : count // 4]
        y = self.embed(patches) + self.place
        y = self.encoder(y.gather(1, kept[..., None].expand(-1, -1, WIDTH)))
        y = torch.cat([y, self.hidden.expand(rows, count - y.shape[1], -1)], 1)
        y = y.gather(1, back[..., None].expand(-1, -1, WIDTH)) + self.place
        mask = noise.new_ones(rows, count)
        mask[:, : count // 4] = 0
        mask = mask.gather(1, back)
        return ((self.head(y) - patches).square().mean(-1) * mask).sum() / mask.sum()


class Slots(nn.Module):
    """Slots compete for places and are updated by a recurrent cell (Locatello et al., 2020)."""

    def __init__(self, slots: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.slots = nn.Parameter(torch.randn(slots, WIDTH))
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.cell, self.norm = nn.GRUCell(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.decode = nn.Linear(WIDTH, 16 * 4)

    def forward(self, x: Tensor) -> Tensor:
        places = self.stem(x).flatten(2).mT
        k, v = self.k(places), self.v(places)
        slots = self.slots.expand(len(x), -1, -1)
        for _ in range(2):
            share = torch.einsum("bsd,bnd->bns", self.q(self.norm(slots)), k).softmax(-1) + 1e-8
            share = share / share.sum(1, keepdim=True)
            update = torch.einsum("bns,bnd->bsd", share, v)
            slots = self.cell(update.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        y = self.decode(slots).view(*slots.shape[:2], 16, 4)
        y = (y[..., :3] * y[..., 3:].softmax(1)).sum(1).mT.unflatten(2, (4, 4))
        return F.mse_loss(y, F.avg_pool2d(x, 4))


class Detector(nn.Module):
    """Anchors on a grid with a focal loss and boxes compared where there is an object."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), nn.BatchNorm2d(WIDTH), nn.SiLU())
        self.classes, self.boxes = nn.Conv2d(WIDTH, LABELS, 1), nn.Conv2d(WIDTH, 4, 1)

    def forward(self, x: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        y = self.net(x)
        scores = self.classes(y).permute(0, 2, 3, 1).reshape(-1, LABELS)
        found = self.boxes(y).permute(0, 2, 3, 1).reshape(-1, 4).sigmoid()
        labels, boxes = labels.flatten(), boxes.flatten(0, 2)
        here = labels >= 0
        wanted = F.one_hot(labels.clamp(min=0), LABELS) * here[:, None]
        p = scores.sigmoid()
        hard = torch.where(wanted.bool(), 1 - p, p) ** 2
        loss = F.binary_cross_entropy_with_logits(scores, wanted.type_as(p), reduction="none")
        low, high = torch.max(found[:, :2], boxes[:, :2]), torch.min(found[:, 2:], boxes[:, 2:])
        both = (high - low).clamp(min=0).prod(1)
        apart = F.smooth_l1_loss(found, boxes, reduction="none").sum(1)
        count = here.sum().clamp(min=1)
        return ((hard * loss).sum() + ((apart - both) * here).sum()) / count
