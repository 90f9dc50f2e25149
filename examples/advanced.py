"""Layouts: a network whose matrix products use layouts that shard counts cannot express.

torchrun --nproc-per-node 8 examples/advanced.py    # 8 devices
python examples/advanced.py                         # one device

The data is MNIST if the environment variable DATA_PATH names its folder, otherwise scikit-learn's
digits, enlarged.
"""

import argparse
from itertools import islice

import torch
from torch import nn

import shardwright as sw
from shardwright.run import Batches, World, mnist_or_digits, process_group


class Network(nn.Module):
    """Images [batch, 1, 28, 28] to logits [batch, 10], by products of x with weights (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.fc1_weight = nn.Parameter(torch.randn(28 * 28, 512) * (2 / (28 * 28)) ** 0.5)
        self.fc2_weight = nn.Parameter(torch.randn(512, 512) * (2 / 512) ** 0.5)
        # Small, so that all classes start out equally likely: the loss starts at ln 10 = 2.30.
        self.fc3_weight = nn.Parameter(torch.randn(512, 10) * 1e-3)
        self.matmul1 = sw.Op(torch.matmul)
        self.relu1 = nn.ReLU()
        self.matmul2 = sw.Op(torch.matmul)
        self.relu2 = nn.ReLU()
        self.matmul3 = sw.Op(torch.matmul)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.flatten(x)
        x = self.relu1(self.matmul1(x, self.fc1_weight))
        x = self.relu2(self.matmul2(x, self.fc2_weight))
        return self.matmul3(x, self.fc3_weight)


def pin(net: Network) -> None:
    """For 8 devices; operators that are not pinned are data parallel."""
    layout = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))
    sw.shard(net.matmul1, (layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None")))
    sw.shard(net.relu1, ((4, 1),))
    # The reduced dimension is sharded 8 ways: every device has one term of the full result.
    line = sw.Layout((8,), ("tp",))
    sw.shard(net.matmul2, (line("None", "tp"), line("tp", "None")))
    sw.shard(net.relu2, ((8, 1),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="maximum steps per epoch")
    parser.add_argument("--log-every", type=int, default=10, help="steps between printed lines")
    arguments = parser.parse_args()

    world = World.from_environment()
    batches = Batches(mnist_or_digits(), batch_size=32)
    torch.manual_seed(1)
    network = Network()
    if world.size > 1:
        pin(network)
    net = sw.WithLoss(network, nn.CrossEntropyLoss())
    mode = "semi_auto" if world.size > 1 else "stand_alone"
    plan = sw.plan(net, next(batches.epoch(0)), devices=world.size, mode=mode)
    if world.rank == 0:
        print(plan)

    with process_group(world) as device:
        net = sw.parallelize(net, plan, device)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
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
