"""The recursive search, without pins: 784-512-512-1, mean absolute error, momentum.

torchrun --nproc-per-node 8 examples/network.py     # 8 devices
python examples/network.py                          # one device
shardwright train examples/network.yaml --devices 8 # from a configuration

The data is MNIST if the environment variable DATA_PATH names its folder, otherwise scikit-learn's
digits, enlarged.
"""

import argparse
from itertools import islice

import torch
from torch import nn

import shardwright as sw
from shardwright.run import Batches, MeanAbsoluteError, World, mnist_or_digits, process_group


class Network(nn.Module):
    """Images [batch, 1, 28, 28] to one number per image, [batch, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = nn.Linear(28 * 28, 512)
        self.layer2 = nn.Linear(512, 512)
        self.layer3 = nn.Linear(512, 1)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.flatten(x)
        x = self.relu(self.layer1(x))
        x = self.relu(self.layer2(x))
        return self.layer3(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="maximum steps per epoch")
    parser.add_argument("--log-every", type=int, default=10, help="steps between printed lines")
    arguments = parser.parse_args()

    world = World.from_environment()
    batches = Batches(mnist_or_digits(), batch_size=32)
    torch.manual_seed(1)
    net = sw.WithLoss(Network(), MeanAbsoluteError())
    plan = sw.plan(net, next(batches.epoch(0)), devices=world.size)
    if world.rank == 0:
        print(plan)

    with process_group(world) as device:
        net = sw.parallelize(net, plan, device)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.1)
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
