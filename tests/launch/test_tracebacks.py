"""Test that the launcher prints the same traceback as Python for a failing program."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launch.jobs import environment, ours, run, write

PROGRAMS = {
    "syntax": "import os\ndef f(:\n    pass\n",
    "raises": "def f():\n    raise ValueError('boo')\nf()\n",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('k') from error\n",
    "not an Exception": "class Stop(BaseException): pass\nraise Stop('here')\n",
    "no message": "class E(Exception):\n    def __str__(self): raise RuntimeError('bad')\nraise E\n",
    "imports": "import json\njson.loads('{')\n",
    "missing module": "import no_such_module\n",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_fails_as_under_python(tmp_path, name):
    program = write(tmp_path, PROGRAMS[name])
    plain = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment())
    status, _, err = run(ours("-n", "1", program))
    assert status == plain.returncode == 1
    assert f"rank 0 (pid {err.split('pid ')[1].split(')')[0]}) failed:\n\n{plain.stderr}\n" in err


@pytest.mark.parametrize("text", [PROGRAMS["syntax"], PROGRAMS["raises"]])
def test_a_module_fails_without_the_frames_that_start_it(tmp_path, text):
    write(tmp_path, text, "broken.py")
    _, _, err = run(ours("-n", "1", "-m", "broken"), tmp_path)
    assert f'File "{tmp_path}/broken.py", line' in err
    assert "runpy" not in err and "importlib" not in err and "child.py" not in err


def test_a_script_is_the_main_module(tmp_path):
    """The script has the name and file of the main module, and its classes can be pickled."""
    program = write(
        tmp_path,
        "import pickle, sys\nclass A: pass\nassert type(pickle.loads(pickle.dumps(A()))) is A\n"
        "print(__name__, __file__, sys.argv, sys.path[0])\n",
    )
    _, out, err = run(ours("-n", "1", program, "x"))
    assert out == f"__main__ {program} {[program, 'x']} {tmp_path}\n", err
