"""forge.optim.AdamW: torch.optim.AdamW with forge's own kernel, one launch for all parameters of a dtype."""

import warnings
from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from forge import hub
from forge.executors.hubex.builtin import FOLDERS
from forge.ir import check

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_REPOSITORY = next(folder for folder in FOLDERS if folder.name == "forge-triton")


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW in one Triton kernel launch for all parameters of a group and dtype.

    The results are those of torch.optim.AdamW(fused=True) within rounding. torch's fused AdamW runs instead, with one
    warning that gives the reason, where Triton is missing or a group has a parameter that the kernel does not support:
    not on a GPU, of a dtype other than float32, bfloat16 and float16, a subclass of Tensor, or not dense. Either class
    loads the other's state_dict. Moments with a dtype of their own are read from the state_dict that was passed, before
    hooks that change it.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr: Learning rate. A one-element tensor on the parameters' device is read when the step runs, as a CUDA graph
            needs.
        betas: Decay rates of the two moments.
        eps: Term added to the denominator.
        weight_decay: Decoupled weight decay.
        amsgrad: Use the maximum of the second moments.
        maximize: Maximize the objective instead of minimizing it.
        foreach: torch's own implementation; not supported.
        capturable: Always in effect: steps are counted on the device.
        differentiable: torch's own implementation; not supported.
        fused: Always in effect: torch.amp.GradScaler passes its scale.
        moment_dtype: torch.float32, or None for the dtype of each parameter; may differ by group.

    Raises:
        ValueError: For an argument that is not supported or out of range.
        RuntimeError: For complex parameters and sparse gradients.
        NotImplementedError: If the kernel cannot run and `moment_dtype` differs from the parameter's dtype.

    Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization, 2019; torch.optim.AdamW.
    """

    def __init__(  # noqa: PLR0913  the arguments of torch.optim.AdamW
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        moment_dtype: torch.dtype | None = None,
    ) -> None:
        refused = {"foreach": foreach is True, "differentiable": differentiable, "fused": fused is False}
        for name in (name for name, is_asked in refused.items() if is_asked):
            text = f"{name}={name != 'fused'} asks for one of torch's own implementations: use torch.optim.AdamW"
            raise ValueError(f"forge.optim.AdamW: {text}")
        self._moment_dtype = moment_dtype  # of groups that do not say, while they are added
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable, fused=True
        )
        self._runs: dict[int, _Run] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own. Raises ValueError for a moment_dtype that is neither None nor
        torch.float32."""
        if "moment_dtype" not in self.defaults:
            self.defaults["moment_dtype"] = self._moment_dtype
        moment_dtype = param_group.get("moment_dtype", self.defaults["moment_dtype"])
        check(
            moment_dtype in (None, torch.float32),
            lambda: (
                f"forge.optim.AdamW: moment_dtype is {moment_dtype}, but must be torch.float32, or None for the "
                "parameters' own"
            ),
            ValueError,
        )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state_dict of this class or of torch.optim.AdamW. The moments' dtype stays what it is here."""
        dtypes = [group["moment_dtype"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        numbers = iter(saved)
        for group, dtype in zip(self.param_groups, dtypes, strict=True):
            group["moment_dtype"] = dtype
            for param, number in zip(group["params"], numbers, strict=False):
                entries, state = state_dict["state"].get(number, {}), self.state[param]
                for name in MOMENTS:
                    if name in state:  # torch has rounded it to the parameter's dtype, and kept its strides
                        own = entries[name] if dtype not in (None, param.dtype) else state[name]
                        state[name] = _moment(param, dtype).copy_(own)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._runs = {}
        for group in self.param_groups:
            group.update(fused=True, foreach=None, differentiable=False)
            group.setdefault("moment_dtype", None)
            for param in group["params"]:
                if self.state.get(param):
                    step = self.state[param]["step"]
                    self.state[param]["step"] = step.to(param.device, torch.float32)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. `closure` computes the loss again, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._run(number, group, params)
        return loss

    @torch.compiler.disable
    def _run(self, number: int, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        check(
            all(grad.layout is torch.strided for grad in grads),
            lambda: "forge.optim.AdamW: a gradient is sparse, but must be dense; torch.optim.SparseAdam takes those",
            RuntimeError,
        )
        states = [self.state[param] or self._first_state(param, group) for param in params]
        run = self._runs.setdefault(number, _Run())
        if run.is_new(params):
            for param, state in zip(params, states, strict=True):  # a parameter's memory format may have changed
                state.update({name: _laid_out_as(param, state[name]) for name in MOMENTS if name in state})
        reason = run.why_unsupported(params)
        lists = (
            params,
            grads,
            [state[MOMENTS[0]] for state in states],
            [state[MOMENTS[1]] for state in states],
            [state[MOMENTS[2]] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
        )
        options: dict[str, Any] = {name: group[name] for name in ("lr", "eps", "weight_decay", "maximize")}
        options |= {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}  # of a GradScaler
        if reason is None and run.step is not None:
            run.step(*lists, betas=group["betas"], **options)
            return
        assert reason is not None, "where the kernel runs a step, it is there"
        _check_moments(group, params, reason)
        _notice(reason)
        beta1, beta2 = group["betas"]
        laid_out = [_laid_out_as(param, grad) for param, grad in zip(params, grads, strict=True)]
        adamw(params, laid_out, *lists[2:], fused=True, capturable=group["capturable"], amsgrad=group["amsgrad"],
              beta1=beta1, beta2=beta2, **options)  # fmt: skip
        for grad, used in zip(grads, laid_out, strict=True):
            if used is not grad and options["grad_scale"] is not None:  # a step leaves gradients without their scale
                grad.copy_(used)

    def _first_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = self.state[param]
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in MOMENTS[: 3 if group["amsgrad"] else 2]:
            state[name] = _moment(param, group["moment_dtype"])
        return state


class _Run:
    """State of a parameter group between steps. step: the kernel's, where it supports the group's parameters."""

    def __init__(self) -> None:
        self.step: Callable | None = None
        self._asked: list[tuple] = []
        self._is_new = True
        self._reason: str | None = None

    def is_new(self, params: list[Tensor]) -> bool:
        """Return whether these are others than at the last step, or in another memory format; note them."""
        before, self._asked = self._asked, [(id(each), each.dtype, each.device, each.stride()) for each in params]
        self._is_new = before != self._asked
        return self._is_new

    def why_unsupported(self, params: list[Tensor]) -> str | None:
        """Return why the kernel does not run the step; None where it does."""
        if self._is_new:
            kernel, self._reason = _kernel()
            if kernel is not None:
                self._reason = next(filter(None, map(kernel.adamw_unsupported, params)), None)
                if self._reason is None and self.step is None:
                    self.step = kernel.AdamWStep()
        return self._reason


def _moment(param: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)


def _laid_out_as(param: Tensor, other: Tensor) -> Tensor:
    """Return a gradient or a moment with the parameter's strides, which torch's fused AdamW takes for granted."""
    return other if other.stride() == param.stride() else torch.empty_like(param, dtype=other.dtype).copy_(other)


def _check_moments(group: dict[str, Any], params: list[Tensor], reason: str) -> None:
    """Raise NotImplementedError where torch's own AdamW does not have the moments that a group asks for."""
    moment_dtype = group["moment_dtype"]
    other = next((param.dtype for param in params if moment_dtype not in (None, param.dtype)), None)
    check(
        other is None,
        lambda: (
            f"forge.optim.AdamW: moment_dtype={moment_dtype} for parameters of {other} needs forge's own kernel, which "
            f"does not run here: {reason}"
        ),
        NotImplementedError,
    )


@cache
def _kernel() -> tuple[ModuleType | None, str | None]:
    """Return (the repository that comes with forge, None), or (None, why it cannot be used)."""
    try:
        return hub.load(hub.resolve(_REPOSITORY, policy=hub.Policy(local=True))), None
    except (hub.HubError, ImportError) as error:
        return None, f"{_REPOSITORY.name} cannot be loaded: {error}"


@cache
def _notice(reason: str) -> None:
    warnings.warn(f"forge.optim.AdamW runs torch's fused AdamW: {reason}", hub.HubNotice, stacklevel=2)
