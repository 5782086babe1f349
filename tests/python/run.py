"""Runs pytest on these files; exits with 77, which ctest calls skipped, where there is no pytest."""

import importlib.util
import sys


def main():
    if importlib.util.find_spec("pytest") is None:
        print("skipped: no pytest for this Python (./dev test installs it into build/python)")
        return 77
    import pytest

    return pytest.main(["-q", "-x", "--durations=5", "-p", "no:cacheprovider", *sys.argv[1:]])


if __name__ == "__main__":  # ranks are processes that read this file too
    sys.exit(main())
