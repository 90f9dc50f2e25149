"""Sharding propagation: two layers of a feed-forward network are pinned, the rest follows.

torchrun --nproc-per-node 8 examples/ffn.py     # 8 devices
python examples/ffn.py                          # one device

The data is MNIST if the environment variable DATA_PATH names its folder, otherwise scikit-learn's
digits, enlarged.
"""

import argparse
from itertools import islice

import torch
from torch import nn

import shardwright as sw
from shardwright.run import Batches, World, mnist_or_digits, process_group


class FFN(nn.Module):
    """Images [batch, 1, 28, 28] to logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense1 = nn.Linear(28 * 28, 512)
        self.relu = nn.ReLU()
        self.dense2 = nn.Linear(512, 256)
        self.dense3 = nn.Linear(256, 128)
        self.dense4 = nn.Linear(128, 64)
        self.dense5 = nn.Linear(64, 10)
        for dense in (self.dense1, self.dense2, self.dense3, self.dense4):
            nn.init.kaiming_normal_(dense.weight, nonlinearity="relu")
            nn.init.zeros_(dense.bias)
        # Small, so that all classes start out equally likely: the loss starts at ln 10 = 2.30.
        nn.init.normal_(self.dense5.weight, std=1e-3)
        nn.init.zeros_(self.dense5.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.flatten(x)
        x = self.relu(self.dense1(x))
        x = self.relu(self.dense2(x))
        x = self.relu(self.dense3(x))
        x = self.relu(self.dense4(x))
        return self.dense5(x)


def pin(net: FFN) -> None:
    """For 8 devices: (batch, in_features) sharded 2·4, then 1·8.

    A weight is (out_features, in_features).
    """
    sw.shard(net.dense1, ((2, 4), (1, 4)))
    sw.shard(net.dense3, ((1, 8), (1, 8)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="maximum steps per epoch")
    parser.add_argument("--log-every", type=int, default=10, help="steps between printed lines")
    arguments = parser.parse_args()

    world = World.from_environment()
    batches = Batches(mnist_or_digits(), batch_size=32)
    torch.manual_seed(1)
    ffn = FFN()
    if world.size > 1:
        pin(ffn)
    net = sw.WithLoss(ffn, nn.CrossEntropyLoss())
    mode = "sharding_propagation" if world.size > 1 else "stand_alone"
    plan = sw.plan(net, next(batches.epoch(0)), devices=world.size, mode=mode)
    if world.rank == 0:
        print(plan)

    with process_group(world) as device:
        net = sw.parallelize(net, plan, device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.1)
        for epoch in range(arguments.epochs):
            for step, (images, labels) in enumerate(islice(batches.epoch(epoch), arguments.steps)):
                loss = net(images.to(device), labels.to(device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if world.rank == 0 and step % arguments.log_every == 0:
                    print(f"epoch: {epoch}, step: {step}, loss is {loss:.7f}", flush=True)


if __name__ == "__main__":
    main()
