"""What trl computes of a language model's logits, by operators that can be captured."""

from __future__ import annotations

from functools import wraps
from inspect import getclosurevars
from types import MethodType
from typing import Any

from torch import Tensor, nn

from shardwright.errors import PlanError

COMPUTED = {"log_probs", "entropy", "is_top1"}
"""The fields for each token that are computed here."""


def without_fused_lm_heads(model: nn.Module) -> None:
    """Replaces the heads that trl adds to models by what computes the same of whole logits.

    trl's has an autograd function with a backward pass of its own, and holds the original `forward`
    of the one model that it was added to.

    Raises:
        PlanError: for a head that computes more than `SFTTrainer` uses.
    """
    for part in model.modules():
        forward: Any = vars(part).get("forward")
        if "fused_lm_head" in getattr(getattr(forward, "__code__", None), "co_varnames", ()):
            options = getclosurevars(forward.__func__).nonlocals
            more = sorted(set(options["outputs"]) - COMPUTED)
            if more or options["cast_lm_head_to_fp32"]:
                raise PlanError(
                    f"trl's head of {type(part).__name__} computes "
                    f"{', '.join(more) or 'in float32'}: planned are only the trainers of trl that "
                    "compute what SFTTrainer does"
                )
            part.forward = _of_logits(part, options["temperature"])


def _of_logits(model: nn.Module, temperature: float) -> MethodType:
    from trl.trainer.utils import FusedCausalLMOutput

    original = type(model).forward

    @wraps(original)
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return original(self, *args, **kwargs)
        labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        kwargs.pop("num_items_in_batch", None)
        outputs = original(self, *args, **kwargs)
        logits = outputs.logits.float() / temperature
        if shifted is None:
            logits, shifted = logits[:, :-1], labels[:, 1:]
        mask = shifted != -100

        def masked(values: Tensor) -> Tensor:
            return values.masked_fill(~mask, 0)

        all_log_probs = logits.log_softmax(-1)
        chosen = shifted.clamp(min=0).unsqueeze(-1)
        log_probs = masked(all_log_probs.gather(-1, chosen).squeeze(-1))
        return FusedCausalLMOutput(
            loss=-log_probs.sum() / mask.sum().clamp(min=1),
            log_probs=log_probs,
            entropy=masked(-(all_log_probs.exp() * all_log_probs).sum(-1)),
            is_top1=masked(logits.argmax(-1) == shifted),
            label_mask=mask,
            aux_loss=getattr(outputs, "aux_loss", None),
        )

    return MethodType(forward, model)
