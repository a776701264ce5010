"""The error bound: the maximum distance of a result from float64's.

Let e be the result of eager in some dtype, r eager's result in float64 for the same numbers, f forge's result. In the
Euclidean norm and in the largest element's,

    |f - r| <= 2 |e - r| + (eps + 8 eps32) |r|

where eps is the dtype's distance from 1 to the next number, and eps32 that of float32, in which kernels add up: another
order of a sum's terms is a few roundings. If eager happens to be exact, or a result is a few numbers that cancel,
eager's own distance says little of the dtype; so a result beyond the bound is within it *by conditioning* if the bound
holds with the largest of |e - r| and |r' - r|, where r' is float64's result for inputs each off by half an eps, drawn
`DRAWS` times. |e - r| is itself one draw of a random number, and a lucky one if a loss is a single number, or a
gradient is zero except for rounding. If eager's result e' for those inputs is known, |e' - r'| counts with the others.
If forge's is known, too, a result that exceeds the bound for the original inputs but not for any of the perturbed ones
is an unlucky draw, within by conditioning. Results within by conditioning are counted separately. Integers and booleans
must equal eager's. Elements that are not finite in e or r are ignored: in half precision, eager overflows where forge
may not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

TIMES = 2.0
SUMS = 8.0
DRAWS = 4
WITHIN, CONDITIONED = "within", "by conditioning"

Values = Sequence[Any]


def judge(
    forge: Values,
    eager: Values,
    reference: Callable[[int | None], Values],
    neighbour: Callable[[int], Values] | None = None,
    again: Callable[[int], Values] | None = None,
) -> tuple[str, str]:
    """Return WITHIN, CONDITIONED or "beyond", and a description of the first result that exceeds the bound.

    reference: the values in float64, given None; given a number, those for inputs off by half an eps.
    neighbour, again: eager's values and forge's for the inputs off by half an eps.
    """
    wrong = metadata(forge, eager)
    if wrong is not None:
        return "beyond", wrong
    exact = reference(None)
    places = [place for place, each in enumerate(eager) if isinstance(each, torch.Tensor) and each.is_floating_point()]
    found = {place: beyond(forge[place], eager[place], exact[place], []) for place in places}
    found = {place: why for place, why in found.items() if why is not None}
    if not found:
        return WITHIN, ""
    near = [reference(draw) for draw in range(DRAWS)]
    eagers = [neighbour(draw) for draw in range(DRAWS)] if neighbour else []
    for place in found:
        distances = [each[place].double() - exact[place] for each in near]
        distances += [one[place].double() - other[place] for one, other in zip(eagers, near, strict=False)]
        why = beyond(forge[place], eager[place], exact[place], distances)
        if why is not None and again and eagers:
            others = zip(map(again, range(DRAWS)), eagers, near, strict=True)
            unlucky = not any(beyond(ours[place], theirs[place], r[place], distances) for ours, theirs, r in others)
            why = None if unlucky else why
        if why is not None:
            return "beyond", f"result {place} of {len(eager)}: {why}"
    return CONDITIONED, f"{len(found)} of {len(eager)} results"


def metadata(forge: Values, eager: Values) -> str | None:
    """Return the first difference besides the values of floating point tensors, or None."""
    if len(forge) != len(eager):
        return f"{len(forge)} results where eager has {len(eager)}"
    for place, (one, other) in enumerate(zip(forge, eager, strict=True)):
        if not isinstance(other, torch.Tensor) or not isinstance(one, torch.Tensor):
            if type(one) is not type(other):
                return f"result {place} is a {type(one).__name__} where eager gives a {type(other).__name__}"
            continue
        ours, theirs = ((each.dtype, tuple(each.shape), each.device) for each in (one, other))
        if ours != theirs:
            return f"result {place} is {ours} where eager gives {theirs}"
        if not other.is_floating_point() and not torch.equal(one, other):
            return f"result {place}: {other.dtype} values differ from eager's"
    return None


def beyond(forge: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, distances: Values) -> str | None:
    """Return a description of how a result exceeds the bound, or None. distances: other usual errors like eager -
    exact."""
    eps = torch.finfo(eager.dtype).eps + SUMS * torch.finfo(torch.float32).eps
    ours, theirs, right, *others = (each.detach().double() for each in (forge, eager, exact, *distances))
    counts = theirs.isfinite() & right.isfinite()
    for each in others:
        counts &= each.isfinite()
    right = right.where(counts, 0)
    off, *usuals = (each.where(counts, 0) for each in (ours - right, theirs - right, *others))
    for name, norm in (("Euclidean", torch.linalg.vector_norm), ("largest", _largest)):
        size = norm(right).item()
        distance = norm(off).nan_to_num(nan=torch.inf).item()
        usual = max(norm(each).item() for each in usuals)
        bound = TIMES * usual + eps * size
        if not distance <= bound:
            away = f"{distance:.3g} from float64 in the {name} norm, of {size:.3g}"
            return f"{away}; {usual:.3g} is usual, {bound:.3g} the bound"
    return None


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().max() if x.numel() else x.new_zeros(())


def nudged(tree: Any, dtype: torch.dtype, draw: int | None) -> Any:
    """Return the floating point tensors of a nest in float64, with each number perturbed by half an eps of the dtype,
    up or down."""
    generators: dict[torch.device, torch.Generator] = {}

    def nudge(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        wide = leaf.detach().double()
        if draw is None:
            return wide
        generator = generators.setdefault(leaf.device, torch.Generator(leaf.device).manual_seed(1 + draw))
        signs = torch.randint(0, 2, leaf.shape, generator=generator, device=leaf.device) * 2 - 1
        return wide * (1 + signs * (torch.finfo(dtype).eps / 2))

    return _pytree.tree_map(nudge, tree)
