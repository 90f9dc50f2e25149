"""Selections and writes by masks have static shapes, and the values of the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from core.capture.selections import Program, Selecting, assert_equal_to_eager, batch
from shardwright.core.capture.capture import capture
from shardwright.errors import CaptureError


def write(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[mask] = net.hidden(x[mask]).relu()
    return (out + x).square().mean()


def write_elements(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return x.masked_scatter(mask.unsqueeze(-1), net.hidden(x)[mask]).square().sum()


def write_number(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    h = net.hidden(x).clone()
    h[mask.nonzero(as_tuple=True)] = 0.0
    return h.square().mean()


def changed_mask(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    chosen = mask.clone()
    rows = x[chosen]
    chosen[:] = False
    return net.hidden(rows).sum() / rows.shape[0]


def per_row_labels(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    scores, chosen = net.head(x)[mask].log_softmax(-1), labels[mask]
    return -scores[torch.arange(len(chosen)), chosen].mean()


def boxes_of_labels(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    boxes, chosen = net.hidden(x).flatten(0, 1).view(-1, 4, 2), labels.flatten() % 4
    rows = torch.where(mask.flatten())[0]
    return boxes[rows, chosen[rows] - 1].square().mean()


def boxes_of_rows(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    boxes, chosen = net.hidden(x[mask]).view(-1, 4, 2), labels[mask] % 4
    return boxes[torch.arange(len(chosen)), chosen - 1].square().mean()


def selected_elements(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """A loss of elements that one mask selects of predictions and targets, as SpeechT5's."""
    h = net.hidden(x)
    chosen = h > 0.1
    targets = h.detach().sin().masked_select(chosen)
    return F.l1_loss(h.masked_select(chosen), targets) + F.mse_loss(h[chosen], targets)


EQUAL: dict[str, Program] = {
    "selected elements": selected_elements,
    "a mask": lambda net, x, labels, mask: net.hidden(x)[mask].square().mean(),
    "a mask of columns": lambda net, x, labels, mask: net.hidden(x)[:, mask[0]].square().mean(),
    "masked_select": lambda net, x, labels, mask: (
        net.hidden(x).masked_select(mask[..., None]).sum()
    ),
    "indices": lambda net, x, labels, mask: net.hidden(x)[torch.where(mask)].square().mean(),
    "a table of indices": lambda net, x, labels, mask: (
        net.hidden(x).flatten(0, 1)[mask.flatten().nonzero().squeeze(1)].square().mean()
    ),
    "rows of selected rows": lambda net, x, labels, mask: (
        net.hidden(x)[mask][labels[mask] > 4].square().mean()
    ),
    "flat rows": lambda net, x, labels, mask: net.hidden(x)[mask].view(-1).abs().mean(),
    "heads": lambda net, x, labels, mask: (
        net.hidden(x)[mask].view(-1, 2, 4).transpose(1, 2).softmax(-1).square().mean()
    ),
    "a label of each row": per_row_labels,
    "a label of each row, and its mask": lambda net, x, labels, mask: (
        -net.head(x).log_softmax(-1)[mask, labels[mask]].mean()
    ),
    "a box of the label of each row": boxes_of_labels,
    "a box of each selected row": boxes_of_rows,
    "a write": write,
    "a write of elements": write_elements,
    "a write of a number": write_number,
    "a mask that changes later": changed_mask,
}


@pytest.mark.parametrize("selection", EQUAL)
def test_a_selection_equals_the_model(selection: str) -> None:
    assert_equal_to_eager(EQUAL[selection])


def columns(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    h = net.hidden(x)[mask][:, :4].reshape(4, -1)
    return (h * torch.arange(4.0)[:, None]).sum()


REFUSED: dict[str, tuple[Program, str]] = {
    # With as many rows as columns, the shapes alone would not tell rows from columns.
    "rows that become columns": (columns, "reshapes selected rows so that their elements mix"),
    "numbered rows": (
        lambda net, x, labels, mask: (
            net.head(x)[mask].sum(-1) * torch.arange(x[mask].shape[0])
        ).sum(),
        "uses the numbers 0, 1, … of the selected rows",
    ),
    "rows of two masks": (
        lambda net, x, labels, mask: net.head(x)[mask, labels[~mask]].sum(),
        "combines tensors whose sizes depend on values, such as rows of two masks",
    ),
    "samples of equally many rows": (
        lambda net, x, labels, mask: net.hidden(x)[mask].reshape(len(x), -1).std(),
        "reshapes selected rows so that their elements mix",
    ),
}


@pytest.mark.parametrize("selection", REFUSED)
def test_a_selection_is_refused(selection: str) -> None:
    program, text = REFUSED[selection]
    with pytest.raises(CaptureError, match=text):
        capture(Selecting(program), batch(0.5))
