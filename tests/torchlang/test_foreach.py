"""torch._foreach functions, which optimizers and torch.nn.utils.clip_grad_norm_ call: a call for each tensor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import forge
from forge.torchlang import foreach

Lists = tuple[list[torch.Tensor], ...]


def lists(requires_grad: bool = False) -> Lists:
    torch.manual_seed(0)
    return tuple([(torch.rand(3, 3) / 2 + 0.2).requires_grad_(requires_grad) for _ in range(2)] for _ in range(3))


def operands(op: str, ys: list[torch.Tensor], zs: list[torch.Tensor]) -> list[tuple]:
    """Return the operands, besides the first list, of calls of a torch._foreach function."""
    if op in ("add", "div"):
        return [(ys,), (2.0,), ([2.0, 3.0],), (torch.tensor(2.0),)]
    if op in ("sub", "maximum", "minimum", "pow"):
        return [(ys,), (0.5,), ([0.3, 0.4],)]
    if op == "addcdiv":
        return [(ys, zs), (ys, zs, 0.5), (ys, zs, [2.0, 3.0])]
    if op == "lerp":
        return [(ys, zs), (ys, 0.5), (ys, [0.2, 0.3])]
    return {"copy": [(ys,)], "norm": [(), (1,), (float("inf"),)]}.get(op, [()])


def compare(function: Callable[..., Any], *, with_grad: bool = False) -> None:
    """Compare a function of three lists, jitted and in eager: results, changes of the lists, gradients."""
    jitted = forge.jit(function, executors=["torch"])
    found, expected = lists(with_grad), lists(with_grad)
    with torch.set_grad_enabled(with_grad):
        results, wanted = jitted(*found), function(*expected)
    torch.testing.assert_close(results, wanted)
    torch.testing.assert_close(found, expected)
    if with_grad:
        grads = [torch.autograd.grad(loss, given[0]) for loss, given in ((results, found), (wanted, expected))]
        torch.testing.assert_close(*grads)
    explained = forge.explain(jitted)
    assert not explained.opaque_calls and not explained.graph_breaks and not explained.eager


def test_each_function_is_one_call_for_each_tensor() -> None:
    names = "add addcdiv clone copy_ div_ lerp_ maximum minimum_ norm pow round sqrt_ sub_ zero_".split()
    if not hasattr(torch, "_foreach_clone"):  # torch 2.11
        names.remove("clone")
    functions = [(name.removesuffix("_"), getattr(torch, f"_foreach_{name}")) for name in names]

    def run(xs: list[torch.Tensor], ys: list[torch.Tensor], zs: list[torch.Tensor]) -> list[Any]:
        results = [torch._foreach_pow(0.9, xs), torch._foreach_sub(xs, ys, alpha=3)]
        for op, function in functions:
            for others in operands(op, ys, zs):
                results.append(function([x.clone() for x in xs], *others))
        return results

    compare(run)


def test_all_but_sums_of_powers_are_known() -> None:
    names = {name for name in dir(torch) if name.startswith("_foreach_")}
    assert names - {function.__name__ for function in foreach._CALLED} <= {"_foreach_powsum"}


def test_a_tensor_in_a_list_twice_is_changed_twice() -> None:
    def run(xs: list[torch.Tensor], ys: list[torch.Tensor], zs: list[torch.Tensor]) -> list[torch.Tensor]:
        torch._foreach_add_([xs[0], xs[0], xs[0][1]], 1)
        torch._foreach_mul_(ys, [ys[1], ys[0]])
        return torch._foreach_sub_(zs, xs)

    compare(run)


def test_a_function_has_the_gradients_of_its_calls() -> None:
    def run(xs: list[torch.Tensor], ys: list[torch.Tensor], zs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(torch._foreach_norm(torch._foreach_addcmul(xs, ys, zs, 0.5))).sum()

    compare(run, with_grad=True)


def test_clipping_gradients_has_no_opaque_call() -> None:
    def run(xs: list[torch.Tensor], ys: list[torch.Tensor], zs: list[torch.Tensor]) -> torch.Tensor:
        for weight, grad in zip(xs, ys, strict=True):
            weight.grad = grad
        return nn.utils.clip_grad_norm_(xs, 1.0)

    compare(run)
