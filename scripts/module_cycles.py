"""The modules of a crate that depend on each other in a cycle.

`cycles(source)` gives, for the folder of a crate's sources, every strongly connected component of more than one top-level
module, with a line of the sources for each step of a cycle through it. Tests do not count: they may look anywhere.
"""

import itertools
import re
from pathlib import Path

TESTS = re.compile(r"^\s*#\[cfg\(test\)\]\s*\n\s*(?:pub(?:\([a-z]+\))?\s+)?mod\s+\w+\s*\{.*", re.M | re.S)
TESTED_FILES = re.compile(r"#\[cfg\((?:test|doctest)\)\]\s*\n\s*(?:pub(?:\([a-z]+\))?\s+)?mod\s+(\w+)\s*;")
PATH = re.compile(r"\b((?:crate|super)(?:\s*::\s*super)*)\s*::\s*")
NAME = re.compile(r"(?:r#)?([A-Za-z_]\w*)")


def cycles(source):
    edges = graph(Path(source))
    found = []
    for component in components(edges):
        if len(component) > 1:
            found.append((sorted(component), cycle(edges, component)))
    return sorted(found)


def graph(source):
    """{module: {module: "file:line: text"}} of the top-level modules."""
    texts = {path: path.read_text() for path in sorted(source.rglob("*.rs"))}
    untested = {path: without_comments(TESTS.sub("", text)) for path, text in texts.items()}
    skipped = {name for path, text in texts.items() for name in TESTED_FILES.findall(text)}
    modules = {path.relative_to(source).parts[0].removesuffix(".rs") for path in texts} - {"lib", "main"} - skipped
    exported = {}
    for root in (source / "lib.rs", source / "main.rs"):
        if root in untested:
            exported |= root_names(untested[root], modules)
    edges = {module: {} for module in modules}
    for path, text in untested.items():
        parts = list(path.relative_to(source).with_suffix("").parts)
        if parts[-1] == "mod":
            parts.pop()
        if not parts or parts[0] not in modules or skipped & set(parts):
            continue
        lines = texts[path].splitlines()
        for base, names, offset in references(text):
            above = len(base.split("::")) if base.startswith("super") else len(parts)
            if above < len(parts):
                continue  # still inside the own module
            for name in names:
                target = name if name in modules else exported.get(name)
                if target and target != parts[0] and target not in edges[parts[0]]:
                    number = text.count("\n", 0, offset)
                    edges[parts[0]][target] = f"{path.relative_to(source.parent)}:{number + 1}: {lines[number].strip()}"
    return edges


def without_comments(text):
    """Comments and what is in quotes blank, every line where it was."""
    blank = lambda match: re.sub(r"[^\n]", " ", match.group(0))
    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", blank, text, flags=re.S)


def references(text):
    """Every path that starts in `crate` or `super`: the start, the names that may follow, and where."""
    for match in PATH.finditer(text):
        base = re.sub(r"\s", "", match.group(1))
        if text[match.end() : match.end() + 1] == "{":
            yield base, first_names(text, match.end()), match.start()
        elif name := NAME.match(text, match.end()):
            yield base, [name.group(1)], match.start()


def first_names(text, start):
    """The first name of each part of a `{…}` list of a `use`."""
    names, depth, expecting = [], 0, False
    position = start
    while position < len(text):
        character = text[position]
        if character == "{":
            depth += 1
            expecting = depth == 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                break
        elif character == "," and depth == 1:
            expecting = True
        elif expecting and (name := NAME.match(text, position)):
            names.append(name.group(1))
            expecting = False
            position = name.end()
            continue
        position += 1
    return names


def root_names(text, modules):
    """Which module each name comes from that the root re-exports."""
    found = {}
    for use in re.findall(r"\buse\s+([^;]+);", text):
        use = re.sub(r"^(?:crate|self)::", "", use.strip())
        first = NAME.match(use)
        if first and first.group(1) in modules:
            found |= dict.fromkeys(re.findall(r"\w+", use[first.end() :]), first.group(1))
    return found


def components(edges):
    """Strongly connected components, after Tarjan."""
    index, low, stack, on_stack, found = {}, {}, [], set(), []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        on_stack.add(node)
        for below in edges[node]:
            if below not in index:
                visit(below)
                low[node] = min(low[node], low[below])
            elif below in on_stack:
                low[node] = min(low[node], index[below])
        if low[node] == index[node]:
            component = set()
            while node not in component:
                component.add(stack.pop())
            on_stack.difference_update(component)
            found.append(component)

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def cycle(edges, component):
    """The lines of a shortest cycle through the first module of a component."""
    start = min(component)
    ways, seen = [[start]], {start}
    for way in ways:
        for below in edges[way[-1]]:
            if below == start:
                steps = way + [start]
                return [f"{a} -> {b}  {edges[a][b]}" for a, b in itertools.pairwise(steps)]
            if below in component and below not in seen:
                seen.add(below)
                ways.append(way + [below])
    return []
