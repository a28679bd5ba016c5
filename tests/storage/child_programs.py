"""Programs that tests run in processes of their own."""

from __future__ import annotations

import subprocess
import sys

PATIENCE = 120


def start_python(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program, with pipes as its standard streams."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(program: str, *arguments: str) -> str:
    """Run a program to its end, and return what it printed; one that fails or hangs fails the test."""
    return finish(start_python(program, *arguments))


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a program, and return what it printed."""
    try:
        output, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, errors
    return output
