"""Writes the samples beside it, with an installed reshard: `python make_samples.py`.

They are files of the first version, kept so that every later one reads them. Samples are added, never overwritten.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import reshard.torch as rt

HERE = Path(__file__).parent


def keep(path, name):
    if not (HERE / name).exists():
        shutil.copyfile(path, HERE / name)


def command(*arguments):
    subprocess.run([sys.executable, "-m", "reshard", *map(str, arguments)], check=True)


def main():
    with tempfile.TemporaryDirectory() as folder:
        first, edited, model = (Path(folder) / name for name in ("first", "edited", "model.safetensors"))
        state = {
            "model": {"w": torch.arange(6, dtype=torch.float32).reshape(2, 3), "e": torch.zeros(0, 4, dtype=torch.bfloat16)},
            "steps": [torch.tensor(7), {"lr": 0.5, "name": "adam"}],
        }
        rt.save(state, str(first))
        command("edit", first, edited, "--rename", "^model=net", "--set", "epoch=3")
        command("convert", first, model)
        keep(next(first.glob(".reshard-*.sums")), "first.sums")
        keep(first / "__0_0.distcp", "first.distcp")
        keep(next(edited.glob(".reshard-*.edit")), "edited.edit")
        keep(model, "notes.safetensors")


if __name__ == "__main__":
    main()
