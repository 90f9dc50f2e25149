"""An actor and a critic that learn to balance a pole, with two losses and samples of their own."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

import shardwright as sw


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, observations):
        hidden = self.body(observations)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)

    @torch.no_grad()
    def act(self, observations, generator):
        logits, _ = self(observations)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def environment(state, action):
    """A pole on a cart, for 32 carts at a time: [32, 4] to [32, 4], and a reward for each."""
    x, v, angle, spin = state.unbind(-1)
    push = 2.0 * action - 1.0
    spin = spin + 0.1 * (9.8 * angle.sin() + push)
    state = torch.stack([x + 0.02 * v, v + 0.1 * push, angle + 0.02 * spin, spin], -1)
    return state.clamp(-3, 3), 1.0 - angle.abs()


parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

torch.distributed.init_process_group()
torch.manual_seed(0)
net, still = ActorCritic(), torch.zeros(32, 4)
net = sw.parallelize(net, sw.plan(net, (still,), devices=torch.distributed.get_world_size()))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
start = 0
if options.resume:
    start = sw.load_checkpoint(options.folder, net, optimizer).step

for step in range(start, options.steps):
    generator = torch.Generator().manual_seed(step)
    state, history = torch.randn(32, 4, generator=generator) / 10, []
    for _ in range(8):
        action = net.act(state, generator)
        after, reward = environment(state, action)
        history.append((state, action, reward))
        state = after
    states, actions, rewards = (torch.stack(each) for each in zip(*history, strict=True))
    returns = rewards.flip(0).cumsum(0).flip(0)
    logits, values = net(states.flatten(0, 1))
    advantage = returns.flatten() - values
    choice = Categorical(logits=logits)
    actor_loss = -(choice.log_prob(actions.flatten()) * advantage.detach()).mean()
    critic_loss = F.smooth_l1_loss(values, returns.flatten())
    loss = actor_loss + 0.5 * critic_loss - 0.01 * choice.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    print(f"step {step}: loss {loss.item():.6f} reward {rewards.mean().item():.6f}")

options.folder.mkdir(parents=True, exist_ok=True)
sw.save_checkpoint(options.folder, net, optimizer, position=sw.Position(options.steps))
print("output", net.act(still, torch.Generator().manual_seed(0)).tolist())
