#!/usr/bin/env python3
"""Holds the documentation to what it describes; prints every breach as FILE: what.

README.md shows examples/caller_owned.cpp as it is; the table of components in docs/architecture.md is that of the
CMakeLists.txt; links and the paths in backticks lead somewhere; every `./dev VERB` and `-p PRESET` exists.

usage: check_docs.py [ROOT]
"""

import json
import pathlib
import re
import sys

import check_includes

LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
# `ballast/grads/window.h`, `tests/engine/`: from the root. A component's README may also name its own files bare.
PATH = re.compile(r"`((?:ballast|cli|python|tests|tools|docs|examples|benchmarks|cmake)/[\w./-]+)`")
ROW = re.compile(r"^\| (\w+) \| ([\w ]*?) ?\|", re.MULTILINE)


def documents(root):
    return sorted(
        [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("ballast/*/README.md"), *root.glob("python/README.md")]
    )


def example_breaches(root):
    shown = re.search(r"^```cpp\n(.*?)^```", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    if not shown or shown[1] != (root / "examples/caller_owned.cpp").read_text():
        yield "README.md: the program differs from examples/caller_owned.cpp"


def component_breaches(root):
    text = (root / "docs/architecture.md").read_text()
    table = text[text.index("| component |") :].split("\n\n")[0]
    documented = {name: uses.split() for name, uses in ROW.findall(table) if name != "component"}
    declared = {name: component.uses for name, component in check_includes.read_components(root).items()}
    for name in sorted(documented.keys() | declared.keys()):
        if sorted(documented.get(name, ["(no row)"])) != sorted(declared.get(name, ["(no component)"])):
            yield f"docs/architecture.md: {name} may include {documented.get(name)}, its USES is {declared.get(name)}"


def link_breaches(root):
    for document in documents(root):
        for target in LINK.findall(document.read_text()):
            if not (document.parent / target).exists():
                yield f"{document.relative_to(root)}: link to {target}, which does not exist"


def path_breaches(root):
    for document in documents(root):
        for path in PATH.findall(document.read_text()):
            if not (root / path).exists():
                yield f"{document.relative_to(root)}: names {path}, which does not exist"


def command_breaches(root):
    verbs = set(re.findall(r"^  (\w+) ", (root / "dev").read_text(), re.MULTILINE))
    presets = {preset["name"] for preset in json.loads((root / "CMakePresets.json").read_text())["configurePresets"]}
    for document in documents(root):
        for verb, preset in re.findall(r"\./dev (\w+)(?: -p (\w+))?", document.read_text()):
            if verb not in verbs:
                yield f"{document.relative_to(root)}: ./dev {verb} is no verb"
            if preset and preset not in presets | {"PRESET"}:
                yield f"{document.relative_to(root)}: -p {preset} is no preset"


def breaches(root):
    for check in (example_breaches, component_breaches, link_breaches, path_breaches, command_breaches):
        yield from check(root)


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    found = list(breaches(root))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
