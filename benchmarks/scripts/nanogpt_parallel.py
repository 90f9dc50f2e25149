"""A GPT with a loop of its own, as in nanoGPT: accumulation, clipping, a schedule, generation."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.mlp_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (z.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": others}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size :])
            idx = torch.cat((idx, logits[:, -1, :].argmax(-1, keepdim=True)), dim=1)
        return idx


def get_batch(step):
    numbers = torch.Generator().manual_seed(step)
    start = torch.randint(64, (8, 1), generator=numbers)
    data = (start + 3 * torch.arange(33)) % 64
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

torch.distributed.init_process_group()
torch.manual_seed(1337)
net = GPT(GPTConfig())
net = sw.parallelize(net, sw.plan(net, get_batch(0), devices=torch.distributed.get_world_size()))
optimizer = net.configure_optimizers(weight_decay=0.1, learning_rate=1e-2)
start = 0
if options.resume:
    start = sw.load_checkpoint(options.folder, net, optimizer).step

for step in range(start, options.steps):
    for group in optimizer.param_groups:
        group["lr"] = 5e-3 * (1 + math.cos(math.pi * step / 10))
    total = 0.0
    for micro_step in range(2):
        _, loss = net(*get_batch(2 * step + micro_step))
        (loss / 2).backward()
        total += loss.item() / 2
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step}: loss {total:.6f} norm {norm.item():.6f}")

options.folder.mkdir(parents=True, exist_ok=True)
sw.save_checkpoint(options.folder, net, optimizer, position=sw.Position(options.steps))
print("output", net.generate(get_batch(0)[0][:2, :4], 4).flatten().tolist())
