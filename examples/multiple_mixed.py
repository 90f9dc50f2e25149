"""Hybrid parallelism: pipeline stages, recomputation and sharded optimizer state on 8 devices.

Two stages, four micro-batches, recomputed ReLUs, and the recursive search inside each stage, for
the network 784-512-512-1.

bash examples/run_multiple_mixed.sh                  # 8 processes; log_output/1/rank.*/stdout

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
        self.relu1 = nn.ReLU()
        self.layer2 = nn.Linear(512, 512)
        self.relu2 = nn.ReLU()
        self.layer3 = nn.Linear(512, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.flatten(x)
        x = self.relu1(self.layer1(x))
        x = self.relu2(self.layer2(x))
        return self.layer3(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="maximum steps per epoch")
    arguments = parser.parse_args()

    world = World.from_environment()
    batches = Batches(mnist_or_digits(), batch_size=32)
    torch.manual_seed(1)
    with sw.no_init_parameters():
        net = Network()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    sw.recompute(net.relu1)
    sw.recompute(net.relu2)

    stages = {"net.layer1": 0, "net.relu1": 0, "net.layer2": 1, "net.relu2": 1, "net.layer3": 1}
    net = sw.Pipeline(sw.WithLoss(net, MeanAbsoluteError()), micro_batches=4, stage_config=stages)
    net = sw.AutoParallel(net, parallel_mode="recursive_programming")
    net.hsdp()
    net.full_batch = True
    net.pipeline(stages=2, scheduler="1f1b")

    with process_group(world) as device:
        net.compile(*next(batches.epoch(0)))
        sw.adopt(optimizer, net)
        if world.rank == 0:
            print(net.plan)
        steps = min(len(batches), arguments.steps or len(batches))
        for epoch in range(1, arguments.epochs + 1):
            for images, labels in islice(batches.epoch(epoch - 1), steps):
                loss = net.train_step(images.to(device), labels.to(device))
                optimizer.step()
                optimizer.zero_grad()
            print(f"epoch: {epoch} step: {steps}, loss is {loss.item():.7f}", flush=True)


if __name__ == "__main__":
    main()
