"""A classifier of handwritten digits, trained on all devices by an ordinary training loop.

torchrun --nproc-per-node 8 examples/digits.py      # 8 devices
python examples/digits.py                           # one device
"""

import torch
from torch import nn

import shardwright as sw
from shardwright.run import Batches, World, digits, process_group


class Classifier(nn.Module):
    """Images [batch, 1, 8, 8] to logits [batch, 10]. Nothing in it depends on devices."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(64, width)
        self.hidden2 = nn.Linear(width, width)
        self.output = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.hidden1(images.flatten(1)))
        return self.output(torch.relu(self.hidden2(x)))


def main() -> None:
    world = World.from_environment()
    batches = Batches(digits(), batch_size=32)
    torch.manual_seed(1)
    net = sw.WithLoss(Classifier(), nn.CrossEntropyLoss())
    plan = sw.plan(net, next(batches.epoch(0)), {}, devices=world.size)
    with process_group(world) as device:
        net = sw.parallelize(net, plan, device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for epoch in range(3):
            for step, (images, labels) in enumerate(batches.epoch(epoch)):
                loss = net(images.to(device), labels.to(device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if world.rank == 0 and step % 10 == 0:
                    print(f"epoch: {epoch}, step: {step}, loss is {loss.item()}", flush=True)


if __name__ == "__main__":
    main()
