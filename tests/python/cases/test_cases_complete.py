"""Every reported fault has its test."""

import pathlib
import re


def test_every_number_is_there():
    sources = pathlib.Path(__file__).parent.glob("test_cases_*.py")
    found = {int(number) for source in sources for number in re.findall(r"def test_case_(\d\d)", source.read_text())}
    assert found == set(range(1, 51)), sorted(set(range(1, 51)) ^ found)
