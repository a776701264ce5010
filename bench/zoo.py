"""The benchmark of models of all families at real sizes: a step of forge against torch.compile and eager.

    python -m bench.zoo [--device cpu|cuda] [--only NAME …] [--minutes M] [--results FILE] [--jobs N] [--autotune]
                        [--png FILE] [--write PAGE]

Each model has its own process. All compile concurrently, without caches on disk; when all are ready they are measured
one at a time, in training and inference: wall clock, kernels, peak memory, first call, and agreement with eager.
Results are lines of JSON in FILE, and a model with results is not run again: the same command continues a run that
`--minutes` ended. `--only` also finds the models of bench/unseen_models.py, on which nothing was tuned.
"""

import argparse
import contextlib
import copy
import gc
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

MODES = ("training", "inference")
EAGER, PEER, AUTOTUNED, OURS = "eager", "torch.compile", "torch.compile, max-autotune", "forge"
_KERNELS = 25  # of each system: the longest, in the results
_MEASURING = 15.0  # approximate seconds of a model's measurement

# one model, in its own process


def work(name: str, device: str, autotune: bool, rounds: int) -> None:
    """Compile a model by each system, wait for the parent's signal, measure, and print the results as JSON."""
    import torch

    prepared = {}
    torch.set_num_threads(1)
    for mode in MODES:
        torch._dynamo.reset()
        prepared[mode] = _prepare(name, device, mode == "training", autotune)
    print("ready", flush=True)
    sys.stdin.readline()
    for mode in MODES:
        systems, failures = prepared.pop(mode)
        print(json.dumps({"model": name, "mode": mode, **_measure(systems, failures, device, rounds)}), flush=True)
        del systems
        _free(device)  # memory of graphs


class _Prepared:
    """A system's compiled step: the seconds of its first call, and a function that waits for all compilation."""

    def __init__(
        self, run: Callable[[], Any], compiled: Any, model: Any, first: float, finish: Callable[[Any], Any]
    ) -> None:
        self.run, self.compiled, self.model, self.first, self.finish = run, compiled, model, first, finish

    def results(self) -> tuple[list[Any], list[Any]]:
        """Return copies of the results and of the gradients of a step."""
        result = _leaves(self.run())
        gradients = [each.grad.clone() for each in self.model.parameters() if each.grad is not None]
        for parameter in self.model.parameters():
            parameter.grad = None
        return result, gradients


def _prepare(name: str, device: str, training: bool, autotune: bool) -> tuple[dict[str, _Prepared], dict[str, str]]:
    import torch

    from bench import unseen_models, zoo_models
    from forge.benchmark.model_bench import System, entry, inference, training_step
    from forge.ir.checks import in_one_line

    torch.manual_seed(0)
    model, arguments = {**zoo_models.MODELS, **unseen_models.MODELS}[name](device == "cuda")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = model.to(device, dtype).train(training)
    arguments = {key: _moved(value, device, dtype) for key, value in arguments.items()}
    if not training:
        if "labels" in arguments and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            arguments["decoder_input_ids"] = arguments["labels"]
        arguments = {key: value for key, value in arguments.items() if key not in ("labels", "target")}
    prepared: dict[str, _Prepared] = {}
    failures: dict[str, str] = {}
    for system in _systems(System, entry, autotune):
        memo = {id(each): each for each in model.parameters()}
        own = copy.deepcopy(model, memo)  # separate buffers
        try:
            step = system.prepare(own)
            run = inference(step, arguments)
            if training:
                run = training_step(step, own.parameters(), arguments)
            start = time.perf_counter()
            run()
            _finish(device)
            first = time.perf_counter() - start
            prepared[system.name] = _Prepared(run, step, own, first, system.finish)
        except Exception as error:
            failures[system.name] = in_one_line(error)
        print(f"{system.name} {'training' if training else 'inference'}", flush=True)
        for each in model.parameters():
            each.grad = None
        run = step = own = None
        _free(device)
    return prepared, failures


def _free(device: str) -> None:
    """Free the memory that nothing holds: other models compile on the same GPU."""
    import torch

    gc.collect()
    gc.collect()  # objects that the finalizers of the first collection left
    if device == "cuda":
        torch.cuda.empty_cache()


def _systems(System: Any, entry: Callable, autotune: bool) -> Iterable[Any]:
    import torch

    import forge

    yield System(EAGER, lambda function: function)
    yield System(PEER, lambda function: torch.compile(entry(function)))
    if autotune:
        mode = "max-autotune-no-cudagraphs"
        yield System(AUTOTUNED, lambda function: torch.compile(entry(function), mode=mode))
    yield System(OURS, forge.jit, forge.finish_compiling)


def _moved(value: Any, device: str, dtype: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


def _leaves(result: Any) -> list[Any]:
    """Return detached copies of the tensors of a model's result."""
    import torch

    from forge.torch_internals.pytree import torch_pytree

    return [each.detach().clone() for each in torch_pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]


def _distance(ours: list[Any], theirs: list[Any]) -> float | None:
    """Return |ours - theirs| / |theirs|, over all tensors."""
    pairs = list(zip(ours, theirs, strict=True))
    if not pairs:
        return None
    off = sum((a.float() - b.float()).square().sum().item() for a, b in pairs)
    return math.sqrt(off / max(sum(b.float().square().sum().item() for _, b in pairs), 1e-30))


def _finish(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _measure(systems: Mapping[str, _Prepared], failures: dict[str, str], device: str, rounds: int) -> dict[str, Any]:
    import forge
    from forge.runtime.tiering import CALLS_TO_PROMOTE
    from forge.support.timing import in_turn

    _free(device)
    other_graphs = _bytes_of_graphs(device)

    for each in systems.values():
        for _ in range(2 * CALLS_TO_PROMOTE):  # forge recompiles programs that are called often
            each.run()
        each.finish(each.compiled)
        for _ in range(CALLS_TO_PROMOTE):
            each.run()
    expected = systems[EAGER].results() if EAGER in systems else None
    errors: dict[str, tuple[float | None, float | None]] = {}
    for name, each in systems.items():
        if name != EAGER and expected is not None:
            result, gradients = each.results()
            errors[name] = _distance(result, expected[0]), _distance(gradients, expected[1])
            del result, gradients
    del expected
    _free(device)
    seconds = in_turn({name: each.run for name, each in systems.items()}, rounds=rounds, batch_seconds=0.15)
    rows: dict[str, Any] = {}
    for name, each in systems.items():
        rows[name] = {
            "seconds": statistics.median(seconds[name]),
            "rounds": seconds[name],
            "first": each.first,
            "result_error": errors.get(name, (None, None))[0],
            "gradient_error": errors.get(name, (None, None))[1],
            **(_on_gpu(each) if device == "cuda" else {}),
        }
        if name == OURS and device == "cuda":
            explained = forge.explain(each.compiled)
            rows[name] |= {"recorded": explained.recorded, "unrecorded": explained.unrecorded[:_KERNELS]}
            rows[name]["memory"] += max(_bytes_of_graphs(device) - other_graphs, 0)
        for parameter in each.model.parameters():
            parameter.grad = None
    return {"systems": rows, "failures": failures, "where": _where(device)}


def _bytes_of_graphs(device: str) -> int:
    """Return the bytes that CUDA graphs hold."""
    import torch

    segments = torch.cuda.memory_snapshot() if device == "cuda" else ()
    return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) != (0, 0))


def _on_gpu(each: _Prepared) -> dict[str, Any]:
    """Return a step's peak memory beyond parameters and gradients in bytes, its launches, and its kernels' seconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    each.run()
    gradients = sum(p.grad.nbytes for p in each.model.parameters() if p.grad is not None)
    for parameter in each.model.parameters():
        parameter.grad = None
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    each.run()
    torch.cuda.synchronize()
    memory = torch.cuda.max_memory_allocated() - before - gradients
    start = time.perf_counter()
    each.run()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        each.run()
        torch.cuda.synchronize()
    total: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name][0] += 1
            total[event.name][1] += event.device_time / 1e6
    longest = sorted(total.items(), key=lambda item: -item[1][1])[:_KERNELS]
    return {
        "memory": memory,
        "host": host,
        "launches": int(sum(count for count, _ in total.values())),
        "busy": sum(time for _, time in total.values()),
        "kernels": [(kernel[:120], int(count), time) for kernel, (count, time) in longest],
    }


# all models


def run_all(options: argparse.Namespace, names: list[str]) -> None:
    """Compile the models concurrently and measure them one at a time; append the results to the file of results."""
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        running = _Workers(options, folder)
        waiting, ready, count = list(names), [], 0
        while len(ready) < len(names) and time.monotonic() < deadline - _MEASURING * (len(ready) + 1):
            while waiting and running.compiling < options.jobs:
                running.start(waiting.pop(0))
            for name in running.became_ready(1.0):
                ready.append(name)
                print(f"{name}: compiled", flush=True)
        running.stop_all_but(ready)
        for name in ready:
            if time.monotonic() > deadline:
                break
            lines = running.measure(name, max(1.0, deadline - time.monotonic()))
            with options.results.open("a") as file:
                file.writelines(line + "\n" for line in lines)
            for line in lines:
                print(_summary(json.loads(line)), flush=True)
            count += len(lines) == len(MODES)
        running.stop_all_but([])
    if count < len(names):
        print(f"{count} of {len(names)} models were measured; the same command goes on with the rest")


class _Workers:
    """The processes of models, by name."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.options, self.folder = options, folder
        self.processes: dict[str, subprocess.Popen] = {}
        self.lines: dict[str, list[str]] = {}
        self.events: queue.Queue[tuple[str, str | None]] = queue.Queue()
        self.compiling = 0

    def start(self, name: str) -> None:
        options = self.options
        place = Path(self.folder) / str(len(self.processes))
        place.mkdir()
        environment = dict(
            os.environ,
            FORGE_CACHE_DIR=str(place / "forge"),
            TORCHINDUCTOR_CACHE_DIR=str(place / "inductor"),
            TRITON_CACHE_DIR=str(place / "triton"),
            OMP_NUM_THREADS="1",
            HF_HUB_OFFLINE="1",
        )
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(options.compile_threads))
        command = [sys.executable, "-m", "bench.zoo", "--worker", name, "--device", options.device]
        command += ["--rounds", str(options.rounds), *(["--autotune"] if options.autotune else [])]
        log = (options.results.parent / f"{options.results.stem}.log").open("a")
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
        )  # fmt: skip
        self.processes[name], self.lines[name] = process, []
        self.compiling += 1
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def _read(self, name: str, process: subprocess.Popen) -> None:
        for line in process.stdout or ():
            self.events.put((name, line.rstrip("\n")))
        self.events.put((name, None))

    def became_ready(self, seconds: float) -> list[str]:
        """Return the models whose compilation ended within some seconds."""
        try:
            name, line = self.events.get(timeout=seconds)
        except queue.Empty:
            return []
        if line is None:
            self.compiling -= 1
            print(f"{name}: its process ended with status {self.processes[name].wait()}", flush=True)
        if line != "ready":
            return []
        self.compiling -= 1
        return [name]

    def measure(self, name: str, seconds: float) -> list[str]:
        """Return the lines of results of a model."""
        process = self.processes[name]
        assert process.stdin is not None
        process.stdin.write("measure\n")
        process.stdin.flush()
        lines: list[str] = []
        end = time.monotonic() + seconds
        while len(lines) < len(MODES) and time.monotonic() < end:
            try:
                source, line = self.events.get(timeout=1.0)
            except queue.Empty:
                continue
            if source != name:
                continue
            if line is None:
                break
            if line.startswith("{"):
                lines.append(line)
        self._kill(name)
        return lines

    def stop_all_but(self, names: list[str]) -> None:
        for name in self.processes:
            if name not in names:
                self._kill(name)

    def _kill(self, name: str) -> None:
        process = self.processes[name]
        for pid in (process.pid, *_descendants(process.pid)):  # compilers start their own sessions
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()


def _descendants(pid: int) -> list[int]:
    """Return the descendants of a process."""
    parents: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int((folder / "stat").read_text().rpartition(")")[2].split()[1])].append(int(folder.name))
    pids = [pid]
    for each in pids:
        pids += parents[each]
    return pids[1:]


# results


def load(path: Path) -> list[dict[str, Any]]:
    """Return the results of a file, one per model and mode."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ratio(result: dict[str, Any], key: str = "seconds", peer: str = PEER) -> float | None:
    """Return forge's figure over a peer's; for times, the median over rounds."""
    systems = result["systems"]
    if OURS not in systems or peer not in systems:
        return None
    ours, theirs = systems[OURS], systems[peer]
    if key == "seconds":
        return statistics.median(a / b for a, b in zip(ours["rounds"], theirs["rounds"], strict=True))
    return ours[key] / theirs[key] if ours.get(key, 0) > 0 and theirs.get(key, 0) > 0 else None


def _summary(result: dict[str, Any]) -> str:
    parts = [f"{result['model']}, {result['mode']}:"]
    for name, each in result["systems"].items():
        text = f"{name} {each['seconds'] * 1e3:.2f} ms"
        if "busy" in each:
            text += f" ({each['busy'] * 1e3:.2f} busy, {each['launches']} launches, {each['memory'] / 1e6:.0f} MB)"
        parts.append(f"{text}, first {each['first']:.0f} s;")
    time_ratio = ratio(result)
    parts.append("" if time_ratio is None else f"forge / torch.compile {time_ratio:.3f}")
    parts += [f"{name} failed: {reason}" for name, reason in result["failures"].items()]
    return " ".join(parts)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are not None."""
    logs = [math.log(each) for each in values if each is not None and each > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a table in Markdown, with geometric means last."""
    lines = [
        "| | eager, ms | torch.compile, ms | forge, ms | time | kernels' time | launches | memory | first call |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for mode in MODES:
        of_mode = [each for each in results if each["mode"] == mode]
        for each in of_mode:
            milliseconds = (
                f"{each['systems'][name]['seconds'] * 1e3:.1f}" if name in each["systems"] else "fails"
                for name in (EAGER, PEER, OURS)
            )
            launches = " / ".join(str(each["systems"].get(name, {}).get("launches", "")) for name in (OURS, PEER))
            ratios = {key: ratio(each, key) for key in ("seconds", "busy", "memory", "first")}
            cells = {key: "" if value is None else f"{value:.2f}" for key, value in ratios.items()}
            lines.append(
                f"| {each['model']}, {mode} | {' | '.join(milliseconds)} | {cells['seconds']} | {cells['busy']} | "
                f"{launches} | {cells['memory']} | {cells['first']} |"
            )
        means = (geometric_mean(ratio(each, key) for each in of_mode) for key in ("seconds", "busy", "memory", "first"))
        wall, busy, memory, first = ("" if mean is None else f"**{mean:.2f}**" for mean in means)
        lines.append(f"| **{mode}, geometric mean** | | | | {wall} | {busy} | | {memory} | {first} |")
    return "\n".join(lines)


_COLUMNS = [("training", key) for key in ("seconds", "busy", "memory", "first")]
_COLUMNS += [("inference", key) for key in ("seconds", "busy")]
_HEAD = ["||training|kernels|memory|first call|inference|kernels|", "|---|---|---|---|---|---|---|"]
_MEAN = "**geometric mean**"
Rows = dict[str, list[float | None]]  # ratios to torch.compile by model, one for each of _COLUMNS


def rows_of(results: list[dict[str, Any]]) -> Rows:
    """Return the ratios to torch.compile."""
    ratios = {(each["model"], each["mode"], key): ratio(each, key) for each in results for _, key in _COLUMNS}
    return {name: [ratios.get((name, *column)) for column in _COLUMNS] for name, *_ in ratios}


def rows_on(page: Path) -> Rows:
    """Return the ratios that a page has between its marks."""
    lines = [line[1:-1].split("|") for line in _between_marks(page).splitlines() if line.startswith("|")]
    cells = {name: values for name, *values in lines[2:] if name != _MEAN}
    return {name: [float(value) if value else None for value in values] for name, values in cells.items()}


def summary(rows: Rows) -> str:
    """Return the ratios as a table in Markdown, with geometric means last."""
    means = [geometric_mean(values) for values in zip(*rows.values(), strict=True)]
    lines = list(_HEAD)
    for name, values in {**rows, _MEAN: means}.items():
        lines.append(f"|{name}|{'|'.join('' if value is None else f'{value:.2f}' for value in values)}|")
    return "\n".join(lines)


_BEGIN, _END = "<!-- bench.zoo: begin -->", "<!-- bench.zoo: end -->"


def _between_marks(page: Path) -> str:
    text = page.read_text()
    if _BEGIN not in text or _END not in text:
        raise ValueError(f"{page} has no marks {_BEGIN!r} and {_END!r} to write between")
    return text.split(_BEGIN)[1].split(_END)[0]


def write(page: Path, rows: Rows, title: str, png: Path | None) -> None:
    """Replace the part of a page between the two marks by the plot and the ratios.

    Raises:
        ValueError: If the page has no marks.
    """
    text, old = page.read_text(), _between_marks(page)
    image = [] if png is None else [f"![Time of a step, of torch.compile's]({os.path.relpath(png, page.parent)})", ""]
    page.write_text(text.replace(old, "\n".join(["", f"**{title}**", "", *image, summary(rows), ""])))


def draw(rows: Rows, title: str, path: Path) -> None:
    """Draw the ratios of time to torch.compile's, by model."""
    import matplotlib.pyplot as plt  # only needed for a plot

    figure, axes = plt.subplots(figsize=(8, 0.32 * len(rows) + 1.2))
    for offset, (mode, color) in enumerate(zip(MODES, ("#1f6feb", "#8fb8f6"), strict=True)):
        column = _COLUMNS.index((mode, "seconds"))
        places = [(i, values[column]) for i, values in enumerate(rows.values()) if values[column] is not None]
        axes.barh([i + 0.4 * offset for i, _ in places], [value for _, value in places], 0.36, label=mode, color=color)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks([i + 0.2 for i in range(len(rows))], list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("time of a step, of torch.compile's (less is faster)")
    axes.set_title(title, fontsize=9)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _where(device: str) -> str:
    import torch

    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread, small sizes"
    return f"{where}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", nargs="+", default=[], help="models whose name contains one of these")
    parser.add_argument("--minutes", type=float, default=9.0, help="the time of a run, which the next one continues")
    parser.add_argument(
        "--results", type=Path, default=Path("build/zoo.jsonl"), help="lines of JSON (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="models that compile at once"
    )
    parser.add_argument("--compile-threads", type=int, default=2, help="workers of Inductor, of each model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--autotune", action="store_true", help="one more row: torch.compile with max-autotune")
    parser.add_argument("--png", type=Path, help="draws the ratios to torch.compile's time")
    parser.add_argument("--write", type=Path, help="a page whose rows between the marks of bench.zoo are written anew")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.device, options.autotune, options.rounds)
        return
    from bench import unseen_models, zoo_models

    options.results.parent.mkdir(parents=True, exist_ok=True)
    records = [(each["model"], each["mode"]) for each in load(options.results)]
    models = [*zoo_models.MODELS, *(unseen_models.MODELS if options.only else ())]
    selection = [name for name in models if not options.only or any(part in name for part in options.only)]
    names = [name for name in selection if not all((name, mode) in records for mode in MODES)]
    if names:
        run_all(options, names)
    results = [each for each in load(options.results) if each["model"] in selection]
    print(table(results))
    title = results[-1]["where"] if results else ""
    rows = rows_of([each for each in results if each["model"] in zoo_models.MODELS])
    if options.write:  # models that this run left out stay as they are there
        all_rows = {**rows_on(options.write), **rows}
        rows = {name: all_rows[name] for name in zoo_models.MODELS if name in all_rows}
        write(options.write, rows, title, options.png)
    if options.png:
        draw(rows, title, options.png)


if __name__ == "__main__":
    main()
