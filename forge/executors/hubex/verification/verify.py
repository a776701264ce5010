"""Answers whether a kernel is right. Runs the kernel: in a process of its own, where there can be one."""

from collections.abc import Callable, Iterator

import torch

from forge.executors.calls import Case, NotReproducible, call_of
from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.verification.messages import Answer, Question
from forge.executors.hubex.verification.process import verifying
from forge.executors.hubex.verification.samples import call_cases, general_cases, variations
from forge.executors.hubex.verification.trial import Trial
from forge.torch_internals.dispatch import disable_current_modes


def verify(kernel: Kernel, question: Question, report: Callable[[str], None]) -> Answer:
    """The answer; `report` is told each sample before the kernel runs on it."""
    trial = Trial(kernel, report, question.gradients)
    before, verifying.active = verifying.active, True
    try:
        reason = _reason(trial, question)
    except Exception as error:  # of forge, or of a device that a kernel left unusable
        text = str(error).strip().partition("\n")[0]
        unknown = f"cannot be verified: {type(error).__name__}: {text}"
        return Answer(trial.failed or unknown, trial.accepted, lasting=trial.failed is not None)
    finally:
        verifying.active = before
    return Answer(reason, trial.accepted, trial.rejected[0] if trial.rejected else "")


def _reason(trial: Trial, question: Question) -> str | None:
    with disable_current_modes(), torch.inference_mode(False), torch.random.fork_rng(devices=_seeded(question.device)):
        torch.manual_seed(0)
        reason = trial.run(_cases(trial.kernel, question))
        if reason is None and question.call is None and trial.first is not None:
            reason = trial.run(_like(trial.kernel, trial.first))
    return reason


def _seeded(device: torch.device) -> list[int]:
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


def _cases(kernel: Kernel, question: Question) -> Iterator[Case]:
    if question.call is not None:
        return call_cases(kernel, question.call)
    return general_cases(kernel, question.device, question.dtype)


def _like(kernel: Kernel, case: Case) -> Iterator[Case]:
    """Variations of an OpInfo sample that the kernel took."""
    try:
        return variations(kernel, call_of(case.args, case.kwargs))
    except NotReproducible:
        return iter(())
