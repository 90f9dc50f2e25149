"""An image classifier with batch norm, momentum and a data loader."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwright as sw


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(
            nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
        )

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layers = nn.Sequential(BasicBlock(16, 16, 1), BasicBlock(16, 32, 2))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, num_classes)

    def forward(self, x):
        x = self.layers(torch.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

torch.distributed.init_process_group()
torch.manual_seed(0)
numbers = torch.Generator().manual_seed(1)
labels = torch.randint(10, (96,), generator=numbers)
images = torch.randn(96, 3, 16, 16, generator=numbers) + labels.view(-1, 1, 1, 1) / 5
net = ResNet()
net = sw.parallelize(net, sw.plan(net, (images[:16],), devices=torch.distributed.get_world_size()))
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
start = 0
if options.resume:
    start = sw.load_checkpoint(options.folder, net, optimizer).step

dataset = TensorDataset(images, labels)
loader = DataLoader(dataset, 16, shuffle=True, generator=torch.Generator().manual_seed(2))
net.train()
for step, (image, target) in enumerate(loader):
    if not start <= step < options.steps:
        continue
    output = net(image)
    loss = criterion(output, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.6f}")

net.eval()
with torch.no_grad():
    print("output", net(images[:16]).argmax(1).tolist())
options.folder.mkdir(parents=True, exist_ok=True)
sw.save_checkpoint(options.folder, net, optimizer, position=sw.Position(options.steps))
