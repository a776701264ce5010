"""Every program of the table has the same effects under forge.jit as in eager, with regions that torch's operators run
between checks, and with those that Inductor compiles."""

import warnings

import pytest
import torch
from capture.programs.all_programs import PROGRAMS
from capture.programs.table import Jit, differences, no_jit, observed

from tests.markers import slow_except

EVERY = 6  # one program in this many is compiled by default


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.one_in(3)
def test_a_program_is_eagers(name):
    check_program(name)


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.parametrize("name", slow_except(PROGRAMS, *[*PROGRAMS][::EVERY]))
@pytest.mark.one_in(4)
def test_a_compiled_program_is_eagers(name):
    torch._dynamo.reset()  # otherwise the code of a program is compiled too often
    check_program(name)


def check_program(name):
    program = PROGRAMS[name]
    expected = observed(program.run, no_jit)
    jit = Jit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = observed(program.run, jit)
    assert differences(actual, expected) == []
    assert [reason for reason in jit.eager if not program.eager or program.eager not in reason] == []
