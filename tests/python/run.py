"""Runs pytest on these files; exits with 77, which ctest calls skipped, where there is no pytest."""

import importlib.util
import sys

if importlib.util.find_spec("pytest") is None:
    print("skipped: no pytest for this Python (./dev test installs it into build/python)")
    sys.exit(77)

import pytest

sys.exit(pytest.main(["-q", "-x", "--durations=5", "-p", "no:cacheprovider", *sys.argv[1:]]))
