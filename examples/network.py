"""The network of the documents: 784-512-512-1, mean absolute error, momentum.

torchrun --nproc-per-node 8 examples/network.py     # 8 devices
python examples/network.py                          # one
shardwright train examples/network.yaml --devices 8 # the same, from a configuration
"""

import torch
from torch import nn

import shardwright as sw
from shardwright.train import Batches, MeanAbsoluteError, World, digits, process_group


class Network(nn.Module):
    """Images [batch, 1, 28, 28] to one number each, [batch, 1]."""

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
    world = World.from_environment()
    batches = Batches(digits(image_size=28), batch_size=32)
    torch.manual_seed(1)
    net = sw.WithLoss(Network(), MeanAbsoluteError())
    plan = sw.plan(net, next(batches.epoch(0)), {}, devices=world.size)
    with process_group(world) as device:
        net = sw.parallelize(net.to(device), plan, device)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.1)
        for epoch in range(10):
            for step, (images, labels) in enumerate(batches.epoch(epoch)):
                loss = net(images.to(device), labels.to(device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if world.rank == 0 and step % 100 == 0:
                    print(f"epoch: {epoch}, step: {step}, loss is {loss.item()}", flush=True)


if __name__ == "__main__":
    main()
