"""The programs of one seed, whose first find is shrunk and printed: python -m tests.fuzz.worker SEED EXAMPLES FOLDER"""

import sys
import traceback
from collections import Counter
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import FlakyFailure

from forge.executors.inductorex import compile_wait
from tests.fuzz.compare import Difference, check
from tests.fuzz.programs import Program, programs

FIND = 3  # the status of a process that found a difference


def run(seed: int, examples: int, script: Path | None = None) -> Counter:
    """Check `examples` programs. Raises the Difference of the smallest program found; return the counts of the others'
    outcomes.

    script: the file to which each program is written before it runs, in case it aborts the process.
    """
    went: Counter = Counter()
    errors: list[Exception] = []
    # a region that Inductor could not compile: its results are right, but it is an error
    compile_wait.notice = errors.append

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(programs())
    def each(program: Program | None) -> None:
        if program is None or not program.lines:
            went["unsuitable"] += 1
            return
        if script is not None:
            script.write_text(program.script())
        errors.clear()
        try:
            went[check(program)] += 1
        except Difference as difference:
            difference.add_note(program.script())
            raise
        if errors:
            raise Difference(f"Inductor could not compile a region: {errors[0]}") from errors[0]

    each()
    return went


def main(seed: int, examples: int, folder: Path) -> int:
    script = folder / f"{seed}.py"
    try:
        went = run(seed, examples, script)
    except Difference as difference:
        print(f"seed {seed}: {difference}\n    {script}")
        return FIND
    except FlakyFailure as failure:
        print(f"seed {seed}: once, but not again:\n{''.join(traceback.format_exception(failure.exceptions[0]))}")
        return FIND
    script.unlink(missing_ok=True)
    print(f"seed {seed}: {', '.join(f'{count} {name}' for name, count in sorted(went.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
