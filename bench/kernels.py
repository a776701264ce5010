"""The benchmark of the costs of kernels and the speed of the examples.

    python -m bench.kernels [--only calls checker load verify examples models] [--device cpu|cuda]
                            [--repository norms-cpu] [--operation rms_norm] [--large] [--no-compile]

calls: a claimed kernel against the same function called directly. checker: a decision whether a kernel takes a call.
load: resolving, verifying and importing a local kernel. verify: its single comparison with the reference.
examples: every example of examples/kernels/ against eager and torch.compile. models: a Llama's training step with them.
"""

import argparse
import importlib
import os
import sys

import torch

from bench import kernel_calls, kernel_examples, kernel_loading, kernel_models, kernel_verification
from forge.executors.hubex import gather

SECTIONS = ("calls", "checker", "load", "verify", "examples", "models")
NATIVE = kernel_examples.FOLDERS["norms-cpu"]


def bench_calls(options: argparse.Namespace) -> None:
    kernel_examples.build(NATIVE)
    kernels = gather([NATIVE])
    module = importlib.import_module(next(kernel.function.__module__ for kernel in kernels))
    kernel_calls.bench_calls([*kernel_calls.least(), *kernel_calls.native(module, kernels)], options.rounds)


def bench_checker(options: argparse.Namespace) -> None:
    folders = [kernel_examples.FOLDERS[name] for name in _repositories(options)]
    for folder in folders:
        kernel_examples.build(folder)
    kernel_calls.bench_checkers(folders, options.device)


def _repositories(options: argparse.Namespace) -> list[str]:
    return options.repository or kernel_examples.REPOSITORIES[options.device]


def bench_load(options: argparse.Namespace) -> None:
    kernel_examples.build(NATIVE)
    kernel_loading.bench_loading(NATIVE)


def bench_verify(options: argparse.Namespace) -> None:
    kernel_examples.build(NATIVE)
    kernel_verification.bench_verification(NATIVE)


def bench_examples(options: argparse.Namespace) -> None:
    kernel_examples.bench_examples(
        _repositories(options),
        options.device,
        operations=options.operation,
        compiled=not options.no_compile,
        large=options.large,
    )


def bench_models(options: argparse.Namespace) -> None:
    folders = [kernel_examples.FOLDERS[name] for name in _repositories(options)]
    for folder in folders:
        kernel_examples.build(folder)
    kernel_models.bench_models(folders, options.device, compiled=not options.no_compile, rounds=options.rounds)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    devices = list(kernel_examples.REPOSITORIES)
    parser.add_argument("--device", choices=devices, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repository", nargs="+", help="of the examples")
    parser.add_argument("--operation", nargs="+", help="of the examples, such as rms_norm")
    parser.add_argument("--large", action="store_true", help="the examples' largest shapes too")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out of the examples")
    parser.add_argument("--rounds", type=int, default=15, help="of calls")
    options = parser.parse_args()
    choices = {"repository": kernel_examples.REPOSITORIES[options.device], "operation": kernel_examples.OPERATIONS}
    for option, names in choices.items():
        for name in getattr(options, option) or ():
            if name not in names:
                parser.error(f"--{option} {name!r}: on {options.device} there are {', '.join(names)}")
    return options


def main() -> None:
    options = _parsed()
    torch.manual_seed(0)
    if options.device == "cpu":
        torch.set_num_threads(1)
    print(f"{os.cpu_count()} CPUs, on which {os.getloadavg()[0]:.1f} processes ran in the last minute")
    sections = sys.modules[__name__]
    for section in options.only:
        print(f"\n{section}\n")
        getattr(sections, f"bench_{section}")(options)


if __name__ == "__main__":
    main()
