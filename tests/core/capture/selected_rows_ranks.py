"""What `test_selected_rows.py` runs on every rank: losses of rows that masks select."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from core.capture.selections import Selecting, batch
from torchrun import run_checks


def masked_language_model(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(net.head(net.norm(F.gelu(net.hidden(x)[mask]))), labels[mask])


def check_masked_rows_train_as_eager() -> None:
    for micro_batches in (1, 2):
        net, other = Selecting(masked_language_model), Selecting(masked_language_model)
        plan = sw.plan(net, batch(0.5), devices=2, micro_batches=micro_batches)
        parallel = sw.parallelize(net, plan)
        for chance in (0.5, 0.1):
            loss = parallel.train_step(*batch(chance))
            expected = other(*batch(chance))
            expected.backward()
            torch.testing.assert_close(torch.as_tensor(loss).detach(), expected.detach())
            for name, parameter in parallel.named_parameters():
                gradient, reference = parameter.grad, other.get_parameter(name).grad
                if isinstance(gradient, DTensor):
                    gradient = gradient.full_tensor()
                if reference is not None:
                    torch.testing.assert_close(gradient, reference, msg=name)
            parallel.zero_grad()
            other.zero_grad()


CHECKS = (check_masked_rows_train_as_eager,)


if __name__ == "__main__":
    run_checks(CHECKS)
