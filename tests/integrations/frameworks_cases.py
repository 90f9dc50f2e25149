"""A training that frameworks run on several processes, and the same one written out on one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, ACCUMULATED, MAX_NORM = 16, 2, 0.5


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


class WithLoss(Classifier):
    """Returns its loss, as models in pipeline stages do."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(super().forward(x), y)


def samples(count: int) -> TensorDataset:
    numbers = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, 16, generator=numbers), torch.randint(4, (count,), generator=numbers)
    )


def loader(count: int, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=BATCH, shuffle=shuffle)


def classifier(seed: int = 0, model: type[Classifier] = Classifier) -> Classifier:
    torch.manual_seed(seed)
    return model()


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


@dataclass
class Run:
    """What a training gave.

    Args:
        losses: of each batch.
        norms, rates: of each optimizer step, before clipping.
        state: the full parameters, where they are known.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


class OneProcess:
    """The training, without any framework, in `dtype`."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.net = classifier().to(dtype)
        self.optimizer = optimizer_of(self.net)
        self.schedule = schedule_of(self.optimizer)
        self.loader = loader(count)

    def epoch(self) -> Run:
        run, batches = Run(), list(self.loader)
        for number, (x, y) in enumerate(batches, start=1):
            loss = nn.functional.cross_entropy(self.net(x.to(self.dtype)), y)
            run.losses.append(loss.item())
            (loss / ACCUMULATED).backward()
            if number % ACCUMULATED == 0 or number == len(batches):
                norm = nn.utils.clip_grad_norm_(self.net.parameters(), MAX_NORM)
                run.norms.append(norm.item())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                run.rates.append(self.schedule.get_last_lr()[0])
        run.state = {name: value.clone() for name, value in self.net.state_dict().items()}
        return run


def assert_equal_runs(found: Run, wanted: Run, *, with_state: bool = True) -> None:
    """Losses, norms and learning rates are equal but for rounding, and so are parameters."""
    for name in ("losses", "norms", "rates"):
        of_found, of_wanted = (torch.tensor(getattr(run, name)) for run in (found, wanted))
        torch.testing.assert_close(of_found, of_wanted, rtol=1e-5, atol=1e-6, msg=name)
    if with_state:
        assert found.state.keys() == wanted.state.keys()
        torch.testing.assert_close(dict(found.state), dict(wanted.state), rtol=1e-4, atol=1e-6)
