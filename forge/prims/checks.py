"""Prims that look at values when the program runs."""

from forge.ir import Tag, TensorProxy, check
from forge.prims.core import check_tensor, make_prim


def _require_meta(condition: TensorProxy, message: str, error: str) -> None:
    """Raises the built-in exception of the name `error` where the condition, one bool, does not hold."""
    check_tensor("prims.require", condition=condition)
    check(condition.ndim == 0, lambda: f"prims.require: condition is {condition}, but must be one bool")


require = make_prim(
    "require", "require", meta=_require_meta, tags=[Tag.EFFECT, Tag.SYNCHRONIZING, Tag.NOT_DIFFERENTIABLE]
)
