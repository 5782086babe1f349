"""docs/from_deepspeed.md says of every key and call what the code does."""

import argparse
import inspect
import pathlib
import re

import pytest
from deepspeed_table import configuration_rows, missing_rows
from device import DEVICE
from plain import Net, settings

import ballast
from ballast import _missing

SOURCES = pathlib.Path(__file__).resolve().parents[2]
TEXT = (SOURCES / "docs" / "from_deepspeed.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))


def rows(section):
    """(name, status, text), one a name."""
    for line in SECTIONS[section].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                yield name, cells[1] if len(cells) > 1 else "", cells[2].rstrip(" |") if len(cells) > 2 else ""


def lines(section):
    return [line for line in SECTIONS[section].splitlines() if line.startswith("| `")]


@pytest.mark.parametrize(
    "section, wanted", [("Configuration", configuration_rows), ("What DeepSpeed's engine has besides", missing_rows)]
)
def test_tables_that_come_from_the_code(section, wanted):
    assert lines(section) == list(wanted()), "python3 tests/python/deepspeed_table.py prints these tables"


def test_arguments_of_initialize():
    documented = {name: status for name, status, _ in rows("initialize")}
    assert list(documented) == list(inspect.signature(ballast.initialize).parameters)
    for name in (name for name, status in documented.items() if status == "missing"):
        with pytest.raises(ballast.UseError, match=name):
            ballast.initialize(model=Net(), config={}, **{name: object()})


def test_calls_of_the_engine():
    engine = ballast.initialize(model=Net(), config=settings(0), device=DEVICE)[0]
    documented = {name: status for name, status, _ in rows("The engine's calls")}
    assert set(documented.values()) <= {"same", "differs", "own"}
    for name in documented:
        getattr(engine, name)
    public = {name for name in vars(ballast.Engine) if not name.startswith("_")} | {
        n for n in vars(engine) if not n.startswith("_")
    }
    assert public | {"__call__"} == set(documented)
    assert not public & set(_missing.MISSING)
    for name, instead in _missing.MISSING.items():
        with pytest.raises(AttributeError) as error:
            getattr(engine, name)
        assert instead in str(error.value)


def test_free_functions():
    documented = {name: (status, text) for name, status, text in rows("Free functions")}
    missing = {name: text for name, (status, text) in documented.items() if status == "missing"}
    assert missing == _missing.FUNCTIONS
    for name in documented:
        owner, _, own = name.rpartition(".")
        module = getattr(ballast, owner) if owner else ballast
        if name in missing:
            with pytest.raises(AttributeError) as error:
                getattr(module, own)
            assert missing[name] in str(error.value)
        else:
            assert getattr(module, own).__doc__, name


def test_the_first_program(tmp_path):
    code = re.search(r"```python\n(.*?)```", TEXT, re.S).group(1)
    (tmp_path / "ds_config.json").write_text('{"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}')
    model = Net()
    code = code.replace('"ds_config.json"', f'"{tmp_path}/ds_config.json", device="{DEVICE}"').replace(
        "loss = engine(batch)", "loss = engine(batch).mean()"
    )
    names = {"model": model, "batches": [__import__("plain").tokens(0, 0)]}
    exec(code, names)
    assert names["engine"].was_step_applied()


def test_the_arguments_of_a_command_line():
    parser = ballast.add_config_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"]).deepspeed_config == "x.json"


def test_everything_public_is_documented_and_typed():
    assert (SOURCES / "python" / "ballast" / "py.typed").exists()
    for name in ballast.__all__:
        assert getattr(ballast, name).__doc__ if name != "__version__" else True, name
    for name, member in vars(ballast.Engine).items():
        if not name.startswith("_") and inspect.isfunction(member):
            assert inspect.signature(member).return_annotation is not inspect.Signature.empty, name
