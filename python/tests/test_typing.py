"""What a type checker knows of the package, and what the extension's stub says."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parent.parent
STUB = PYTHON / "reshard" / "_reshard.pyi"

#: Names of the stub that stand for anything, and why no type says more.
ANYTHING = {
    "_Tensor": "a tensor of torch, which the extension does not import",
    "_Value": "a value of a state dict, which is whatever the program puts there",
    "_Key": "a key of a dict inside of a state, which may be any plain value",
}

#: Mistakes, each with what the type checker has to say of it.
MISTAKES = {
    "saved.bytes_writen": '"SaveReport" has no attribute "bytes_writen"',
    'saved.bytes + "1"': "Unsupported operand types",
    "loaded.step.bit_count()": 'Item "None" of "int | None" has no attribute "bit_count"',
    'loaded.differences[0]["kye"]': 'TypedDict "Difference" has no key "kye"',
    "loaded.casts[0].form": '"Cast" has no attribute "form"',
    "verified.findings[0].waht": '"Finding" has no attribute "waht"',
    'rt.load({}, "x", cast="yes")': 'Argument "cast" to "load" has incompatible type "Literal[\'yes\']"',
    'rt.load({}, "x", verify="sometimes")': 'Argument "verify" to "load" has incompatible type',
    'rt.async_save({}, "x", overwite=True)': 'Unexpected keyword argument "overwite" for "async_save"',
    'rt.CheckpointManager("x", keep_lst=3)': 'Unexpected keyword argument "keep_lst" for "CheckpointManager"',
    'rt.CheckpointManager("x", mode="largest")': 'Argument "mode" to "CheckpointManager" has incompatible type',
    'rt.Checkpointer("x", keep_lst=3)': 'Unexpected keyword argument "keep_lst" for "Checkpointer"',
    "manager.restore({}, strikt=False)": 'Unexpected keyword argument "strikt" for "restore"',
    'reshard.convert("a", "b", to="pickle")': 'Argument "to" to "convert" has incompatible type',
    "converted.skiped": '"ConvertReport" has no attribute "skiped"',
}


def test_a_type_checker_finds_mistakes_and_nothing_else(tmp_path):
    pytest.importorskip("mypy")
    lines = [
        "import reshard",
        "import reshard.torch as rt",
        'saved = rt.save({}, "x")',
        'loaded = rt.load({}, "x", cast="any", verify="always")',
        'manager = rt.CheckpointManager("x", keep_last=3, mode="max", checksums=False)',
        'verified = reshard.verify("x")',
        'converted = reshard.convert("a", "b", to="dcp")',
        "total: int = saved.bytes + loaded.bytes_read + verified.checked",
    ]
    first = len(lines) + 1
    snippet = tmp_path / "snippet.py"
    snippet.write_text("\n".join([*lines, *MISTAKES, ""]))
    # What torch itself says of its types is its own matter, and takes minutes to find out.
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n")
    options = ["--config-file", str(config), "--no-error-summary", "--hide-error-codes", "--cache-dir", "/dev/null"]
    command = [sys.executable, "-m", "mypy", *options, str(snippet)]
    environment = {"MYPYPATH": str(PYTHON), "PATH": "/usr/bin:/bin"}
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    errors: dict[int, str] = {}
    for line in found.stdout.splitlines():
        match = re.match(r".*snippet\.py:(\d+): error: (.*)", line)
        if match:
            errors.setdefault(int(match[1]), match[2])
    expected = {first + at: text for at, text in enumerate(MISTAKES.values())}
    assert sorted(errors) == sorted(expected), found.stdout + found.stderr
    for line, text in expected.items():
        assert errors[line].startswith(text), found.stdout


def _definitions():
    def below(body, prefix):
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from below(node.body, f"{prefix}{node.name}.")

    return dict(below(ast.parse(STUB.read_text()).body, ""))


def test_every_class_and_function_of_the_stub_is_documented():
    # What Python calls by itself says what it is by its name.
    undocumented = [
        name
        for name, node in _definitions().items()
        if not ast.get_docstring(node) and not re.fullmatch(r"__\w+__", name.rpartition(".")[2])
    ]
    assert not undocumented


def test_the_stub_says_any_only_where_nothing_more_is_known():
    tree = ast.parse(STUB.read_text())
    uses = {node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "Any"}
    meant = {
        assigned.targets[0].id: assigned.value
        for assigned in tree.body
        if isinstance(assigned, ast.Assign) and isinstance(assigned.targets[0], ast.Name) and assigned.value in uses
    }
    assert meant.keys() == ANYTHING.keys()
    assert not [f"line {node.lineno}" for node in uses - set(meant.values())]
