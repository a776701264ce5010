"""OpInfos of the views as copies: with the samples and errors of the views."""

from dataclasses import replace
from functools import partial

import torch

import forge.testing.opinfos.joining  # noqa: F401  its OpInfos are taken below, and those of shape
from forge.testing.opinfo import ALL, all_opinfos, register_opinfo
from forge.testing.opinfos.shape import NARROW_ERRORS
from forge.testing.table import no_tensor, op, sample, t, unary, wrong
from forge.torch_internals.versions import TORCH

_VIEWS = {
    "diagonal_copy": "diagonal",
    "expand_copy": "Tensor.expand",
    "permute_copy": "permute",
    "select_copy": "select",
    "slice_copy": "ops.aten.slice",
    "split_with_sizes_copy": "split_with_sizes",
    "squeeze_copy": "squeeze",
    "t_copy": "t",
    "transpose_copy": "transpose",
    "unbind_copy": "unbind",
    "unfold_copy": "Tensor.unfold",
    "unsqueeze_copy": "unsqueeze",
    "view_copy": "reshape",
}
_REAL_GRADIENT = ("select_copy", "slice_copy")  # torch refuses complex arguments that require a gradient
_WITH_COMPLEX = (*ALL, torch.complex64)
_opinfos = {info.name: info for info in all_opinfos()}
for _name, _view in _VIEWS.items():
    _dtypes = ALL if _name in _REAL_GRADIENT else _WITH_COMPLEX
    register_opinfo(replace(_opinfos[_view], name=_name, op=getattr(torch, _name), symbols=(), dtypes=_dtypes))

# torch's gradient of narrow_copy is wrong for a start counted from the end
_narrows = [sample(t(4, 3), 0, 1, 2), sample(t(3, 4).t(), -1, 0, 2)]
_narrow = partial(op, family=(_narrows, NARROW_ERRORS), dtypes=_WITH_COMPLEX)
_narrow("narrow_copy Tensor.narrow_copy", gradient=TORCH >= (2, 12))  # torch's derivative came then
op("alias_copy", unary((2, 3), (), (0, 3)), no_tensor(), dtypes=_WITH_COMPLEX)
op(
    "split_copy",
    [sample(t(5, 3), 2), sample(t(4, 6).t(), 4, -1), sample(t(0, 3), 2)],
    wrong(t(), 2, match="at least a 1-dimensional tensor"),
    dtypes=_WITH_COMPLEX,
)
