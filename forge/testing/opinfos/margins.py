"""OpInfos of the margin losses of several classes."""

import torch
import torch.nn.functional as F

from forge.testing.opinfo import OpInfo, Sample, register_opinfo, sample
from forge.testing.opinfos.specs import Spec, calls, classes, errors, given, t, wrong


def _register(name: str, samples: tuple[Sample, ...], empty: Sample, mistakes: tuple) -> None:
    wanted = [
        Sample(each.args, {**each.kwargs, "reduction": how}) for each in samples for how in ("none", "mean", "sum")
    ]
    wanted.append(Sample(empty.args, {"reduction": "none"}))  # torch leaves a mean or a sum of nothing undefined
    op = getattr(F, name)
    dtypes = (torch.float32, torch.float64)
    register_opinfo(OpInfo(f"nn.functional.{name}", op, calls(*wanted), errors(*mistakes), dtypes=dtypes))


_register(
    "multi_margin_loss",
    (
        sample(t(4, 5), classes(4, count=5)),
        sample(t(4, 5, swapped=True), classes(4, count=5), 2, 0.5),
        sample(t(4, 5), classes(4, count=5), margin=2.0, p=2),
        sample(t(5), classes(count=5)),
        sample(t(5), classes(1, count=5)),
        sample(t(4, 1), classes(4, count=1)),
    ),
    sample(t(0, 5), classes(0, count=5)),
    (
        wrong(t(4, 5), classes(4, count=5), 3, error=ValueError, match="only p == 1 and p == 2"),
        wrong(t(4, 5), classes(3, count=5), match="inconsistent target size"),
        wrong(t(4, 5), classes(4, count=5), weight=t(2, 5), error=ValueError, match="must be one-dimensional"),
        wrong(t(4, 5), classes(4, count=5), weight=t(4), match="inconsistent weight size"),
        wrong(t(2, 4, 5), classes(2, count=5), match="non-empty vector or matrix"),
    ),
)
_LABELS = Spec((3, 4), dtype=torch.int64, values=[[3, 0, -1, 1], [-1, 2, 2, 2], [1, 1, 2, 0]])
_register(
    "multilabel_margin_loss",
    (
        sample(t(3, 4), _LABELS),
        sample(t(3, 4, swapped=True), _LABELS),
        sample(t(4), given(2, 0, -1, 3, dtype=torch.int64)),
    ),
    sample(t(0, 4), classes(0, 4, count=3)),
    (
        wrong(t(3, 4), classes(3, 3, count=2), match="inconsistent target size"),
        wrong(t(2, 3, 4), classes(2, 3, 4, count=2), match="non-empty vector or matrix"),
    ),
)
