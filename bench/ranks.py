"""Ranks for rows that need several: processes with a gloo group between them, forked from one that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

_context: Any = None


def _forks() -> Any:
    global _context
    if _context is None:
        here = os.path.dirname(os.path.abspath(__file__))
        package = os.path.join(os.path.dirname(here), "python")
        paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), package]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(
            ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "reshard.torch", "harness"]
        )
    return _context


def _main(function: Callable[..., Any], rank: int, size: int, store: str, connection: Any, arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    import warnings

    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    # As torchrun does: ranks share the machine.
    torch.set_num_threads(1)
    try:
        if size > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        connection.send((True, function(rank, size, *arguments)))
    except BaseException as error:
        connection.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        connection.close()
        os._exit(0)


def run(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 600) -> list[Any]:
    """What each rank returned; with one rank there is no process group, only a process of its own."""
    forks = _forks()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes, connections = [], []
        for rank in range(size):
            mine, theirs = forks.Pipe(duplex=False)
            process = forks.Process(target=_main, args=(function, rank, size, store, theirs, arguments), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(mine)
        deadline = time.monotonic() + timeout
        results, failures = [], []
        for rank, connection in enumerate(connections):
            try:
                if not connection.poll(max(deadline - time.monotonic(), 0.0)):
                    failures.append(f"rank {rank} did not answer within {timeout} s")
                    continue
                fine, result = connection.recv()
            except EOFError:
                failures.append(f"rank {rank} died")
                continue
            (results if fine else failures).append(result)
        for process in processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
    if failures:
        raise RuntimeError("\n".join(failures))
    return results


def together(work: Callable[[], Any]) -> float:
    """Seconds from when all ranks begin until this one has ended."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    dist.barrier()
    return seconds


def slowest(results: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Of each side and round, the rank that took longest."""
    return {name: [max(values) for values in zip(*(result[name] for result in results))] for name in results[0]}
