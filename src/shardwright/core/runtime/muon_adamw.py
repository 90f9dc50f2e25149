"""Muon for matrices and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from shardwright.core.layout.axes import Shape

ORTHOGONALIZED = "is_muon"
"""Key of a parameter group: whether Muon updates the group."""


def is_orthogonalized(shape: Shape, tables: Collection[Shape]) -> bool:
    """Whether Muon updates a parameter: a matrix, except embeddings and output heads.

    Args:
        shape: full shape of the parameter.
        tables: shapes of embeddings, which output heads share.
    """
    return len(shape) == 2 and shape not in tables


def table_shapes(net: nn.Module) -> frozenset[Shape]:
    """Return the shapes of a model's embeddings, including embeddings of other pipeline stages."""
    return frozenset(
        (module.num_embeddings, module.embedding_dim)
        for module in net.modules()
        if isinstance(module, nn.Embedding)
    )


class MuonAdamW(Optimizer):
    """Muon for matrices and AdamW for all other parameters, with one learning rate.

    Both use the learning rate and weight decay of AdamW, because Muon's updates are scaled to the
    size of AdamW's (Liu et al., "Muon is Scalable for LLM Training", 2025).

    Args:
        params: parameters, or parameter groups with a `weight_decay` of their own.
        lr, weight_decay: learning rate and weight decay of both optimizers.
        momentum: momentum of Muon.
        betas, eps: coefficients of AdamW.
        tables: shapes of matrices that AdamW updates: embeddings and output heads.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        tables: Collection[Shape] = (),
    ) -> None:
        param_list = list(params)
        groups = (
            param_list
            if param_list and isinstance(param_list[0], dict)
            else [{"params": param_list}]
        )
        groups_by_method: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in groups:
            for is_muon, groups_of_method in groups_by_method.items():
                selected = [
                    p
                    for p in group["params"]  # type: ignore[index]
                    if is_orthogonalized(tuple(p.shape), tables) is is_muon
                ]
                # Groups without parameters too: all stages have the same groups.
                options = {"params": selected, ORTHOGONALIZED: is_muon}
                groups_of_method.append({**group, **options})  # type: ignore[dict-item]
        self._muon = Muon(
            groups_by_method[True],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = AdamW(
            groups_by_method[False], lr=lr, weight_decay=weight_decay, betas=betas, eps=eps
        )
        shared_options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        defaults = {**shared_options, "betas": betas, "eps": eps, "tables": frozenset(tables)}
        # The same dictionaries as in the two optimizers, so that a scheduler's rate reaches both.
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], defaults)
        # `Optimizer` copies all defaults into the groups, and `tables` is not an option of a step.
        for group in self.param_groups:
            group.pop("tables", None)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters once from their gradients.

        Args:
            closure: computes the gradients and returns the loss.

        Returns:
            The loss; None without `closure`.
        """
        loss = None
        if closure is not None:
            # `step` runs without gradients, but the closure needs them.
            with torch.enable_grad():
                loss = closure()
        optimizers: tuple[tuple[Any, bool], ...] = ((self._muon, True), (self._adamw, False))
        for optimizer, is_muon in optimizers:
            # `load_state_dict` replaces groups and state.
            optimizer.param_groups = [g for g in self.param_groups if g[ORTHOGONALIZED] is is_muon]
            optimizer.state = self.state
            optimizer.step()
        return loss
