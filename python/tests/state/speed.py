"""FSDP1 with flat parameters beside PyTorch, in one run: get + save on four ranks, get + load + set on three.

usage: OMP_NUM_THREADS=1 python speed.py [--megabytes 300] [--rounds 3]

Prints what both take (the best round of each), how often each collective was called, and the most memory
each took beyond what was there; for a load that includes the slots, which the optimizer keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time

sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "scatter",
    "scatter_object_list",
    "all_reduce",
    "reduce_scatter_tensor",
    "send",
    "recv",
)


def build(megabytes):
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    torch.manual_seed(0)
    width = 512
    # Parameters and two moments: three tensors of each size.
    layers = max(2, int(megabytes * 1e6 / 3 / 4 / (4 * width * width + 2 * width)))
    blocks = [nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(layers)]
    common = dict(device_id=torch.device("cpu"), use_orig_params=False)
    model = FSDP(nn.Sequential(*[FSDP(block, **common) for block in blocks]), **common)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


class Counted:
    """Counts collectives and their bytes while it is entered."""

    def __enter__(self):
        import torch.distributed as dist

        self.counts, self._kept = {}, {}
        for name in COLLECTIVES:
            original = getattr(dist, name, None)
            if original is None:
                continue
            self._kept[name] = original

            def counted(*arguments, _name=name, _original=original, **options):
                self.counts[_name] = self.counts.get(_name, 0) + 1
                return _original(*arguments, **options)

            setattr(dist, name, counted)
            setattr(dist.distributed_c10d, name, counted)
        return self

    def __exit__(self, *_):
        import torch.distributed as dist

        for name, original in self._kept.items():
            setattr(dist, name, original)
            setattr(dist.distributed_c10d, name, original)


class Peak:
    """The most memory beyond what there was, by samples of the resident size."""

    def __enter__(self):
        self._stop = threading.Event()
        self.start = self.most = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _now(self):
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    def _watch(self):
        while not self._stop.wait(0.002):
            self.most = max(self.most, self._now())

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.extra = max(self.most, self._now()) - self.start


def timed(function):
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    with Counted() as counted, Peak() as peak:
        function()
        dist.barrier()
    counted.counts["barrier"] = 0
    return time.perf_counter() - begin, {k: v for k, v in counted.counts.items() if v}, peak.extra


def saving(rank, size, folder, megabytes, rounds):
    import torch
    import torch.distributed.checkpoint as dcp
    import torch.distributed.checkpoint.state_dict as pt

    import reshard.torch as rt

    model, optim = build(megabytes)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optim.step()
    results = {"ours": [], "theirs": []}
    rt.save({"warm": torch.zeros(4)}, os.path.join(folder, "warm"))
    for number in range(rounds):

        def ours():
            model_state, optim_state = rt.get_state_dict(model, optim)
            rt.save({"model": model_state, "optim": optim_state}, os.path.join(folder, f"ours{number}"))

        def theirs():
            model_state, optim_state = pt.get_state_dict(model, optim)
            writer = dcp.FileSystemWriter(os.path.join(folder, f"theirs{number}"), sync_files=True)
            dcp.save({"model": model_state, "optim": optim_state}, storage_writer=writer)

        for name, function in (("ours", ours), ("theirs", theirs)):
            results[name].append(timed(function))
            dist_barrier()
            if rank == 0 and number:
                shutil.rmtree(os.path.join(folder, f"{name}{number}"), ignore_errors=True)
    return results


def dist_barrier():
    import torch.distributed as dist

    dist.barrier()


def loading(rank, size, folder, megabytes, rounds):
    import torch.distributed.checkpoint as dcp
    import torch.distributed.checkpoint.state_dict as pt

    import reshard.torch as rt

    results = {"ours": [], "theirs": []}
    rt.load({}, os.path.join(folder, "warm"), strict=False)
    for _number in range(rounds):
        for name in ("ours", "theirs"):
            model, optim = build(megabytes)

            def ours():
                model_state, optim_state = rt.get_state_dict(model, optim)
                state = {"model": model_state, "optim": optim_state}
                rt.load(state, os.path.join(folder, "ours0"))
                rt.set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])

            def theirs():
                model_state, optim_state = pt.get_state_dict(model, optim)
                state = {"model": model_state, "optim": optim_state}
                dcp.load(state, checkpoint_id=os.path.join(folder, "theirs0"))
                pt.set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])

            results[name].append(timed(ours if name == "ours" else theirs))
            model = optim = None
    return results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from ranks import Ranks

    ranks = Ranks()
    folder = tempfile.mkdtemp(dir=arguments.folder)
    try:
        report = {}
        for what, size, function in (("get + save on 4 ranks", 4, saving), ("get + load + set on 3 ranks", 3, loading)):
            found = ranks.run(size, function, folder, arguments.megabytes, arguments.rounds, timeout=900)
            line = {}
            for name in ("ours", "theirs"):
                seconds = [max(rank[name][r][0] for rank in found) for r in range(arguments.rounds)]
                line[name] = {
                    "seconds": round(min(seconds), 4),
                    "collectives": found[0][name][-1][1],
                    "megabytes beyond": round(max(r[2] for rank in found for r in rank[name]) / 1e6, 1),
                }
            line["times faster"] = round(line["theirs"]["seconds"] / line["ours"]["seconds"], 1)
            report[what] = line
        print(json.dumps(report, indent=2))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
