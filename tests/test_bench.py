"""The tools of the benchmarks; nothing here is really timed."""

import gzip
import json
from pathlib import Path

from bench.timing import exposed_seconds


def test_communication_is_exposed_where_nothing_else_runs(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 0.0, "dur": 10.0},
        {"cat": "kernel", "name": "gemm", "ts": 2.0, "dur": 3.0},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 4.0, "dur": 2.0},  # beside the product
        {"cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": 8.0, "dur": 4.0},  # two messages at once
        {"cat": "kernel", "name": "gemm", "ts": 11.0, "dur": 9.0},
        {"cat": "gpu_user_annotation", "name": "nccl:all_reduce", "ts": 0.0, "dur": 50.0},
        {"name": "process_name"},
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert round(exposed_seconds(path) * 1e6, 3) == 7  # 0 to 2, 6 to 11
