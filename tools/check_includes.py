#!/usr/bin/env python3
"""Holds the sources to the rules for includes; prints every breach as FILE:LINE: what (what is allowed).

1. A component includes its own headers and those of the components that its ballast_component(USES ...) names.
2. No component reaches itself through USES.
3. A header never includes what would burden all who include it: the whole of LibTorch or ATen, and in a public header
   CUDA, liburing or Highway.
4. A public header (ballast_component(PUBLIC ...)) includes only public ones of ours, so that the installed tree is
   complete; and nothing private to a component is included from outside ballast/ and tests/.

usage: check_includes.py [ROOT]
"""

import pathlib
import re
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
COMPONENT = re.compile(r"\bballast_component\(\s*(\w+)([^)]*)\)")
KEYWORDS = {"USES", "PUBLIC", "PCH", "SOURCES"}
HEAVY = re.compile(r"(torch/(torch|all|extension|script|types)\.h|ATen/ATen\.h)$")
FOREIGN = re.compile(r"(cuda|nccl|liburing|hwy/|CLI/|.*/cuda/)")


class Component:
    def __init__(self, uses, public):
        self.uses = uses
        self.public = public


def read_components(root):
    """{name: Component}, from every ballast/*/CMakeLists.txt."""
    components = {}
    for listing in sorted(root.glob("ballast/*/CMakeLists.txt")):
        text = re.sub(r"#.*", "", listing.read_text())
        for name, arguments in COMPONENT.findall(text):
            words = {keyword: [] for keyword in KEYWORDS}
            current = []
            for word in arguments.split():
                if word in KEYWORDS:
                    current = words[word]
                else:
                    current.append(word)
            public = {f"ballast/{name}/{header}" for header in words["PUBLIC"]}
            components[name] = Component(words["USES"], public)
    return components


def cycles(components):
    """One line for each component that reaches itself."""
    for name in components:
        seen, ahead = set(), list(components[name].uses)
        while ahead:
            other = ahead.pop()
            if other not in seen:
                seen.add(other)
                ahead += components[other].uses if other in components else []
        if name in seen:
            yield f"ballast/{name}/CMakeLists.txt:1: {name} reaches itself through USES (components form no cycle)"


def includes_of(file):
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if match := INCLUDE.match(line):
            yield number, match[1]


def component_of(path):
    """'grads' of ballast/grads/window.h; None of ballast/ballast.h, which stands above all."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "ballast" else None


def breaches_of_file(root, file, components, public):
    path = file.relative_to(root).as_posix()
    own = component_of(path)
    if own and own not in components:
        yield f"{path}:1: no ballast_component({own}) is declared in ballast/{own}/CMakeLists.txt"
        return
    for number, included in includes_of(file):
        where = f"{path}:{number}: includes {included}"
        other = component_of(included)
        if own and other and other != own and other not in components[own].uses:
            yield f"{where} ({own} uses: {' '.join(components[own].uses) or 'nothing'})"
        if path.endswith(".h") and (HEAVY.match(included) or path in public and FOREIGN.match(included)):
            yield f"{where} (too much for a header: include what declares the types, or include it in the source)"
        is_ours = included.startswith("ballast/")
        if is_ours and included not in public and (path in public or path.startswith("examples/")):
            yield f"{where} (only public headers may be included here; public are those that ballast_component(PUBLIC) names)"


def breaches(root):
    components = read_components(root)
    public = set().union({"ballast/ballast.h"}, *(component.public for component in components.values()))
    yield from cycles(components)
    for header in sorted(public):
        if component_of(header) and not (root / header).is_file():
            yield f"ballast/{component_of(header)}/CMakeLists.txt:1: PUBLIC names {header}, which does not exist"
    for folder in ("ballast", "examples", "python"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".h", ".cpp"):
                yield from breaches_of_file(root, file, components, public)


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    found = list(breaches(root))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
