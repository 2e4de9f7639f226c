"""Real processes with a gloo group between them, forked from one that has imported torch once."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from typing import Any


class RankFailed(AssertionError):
    """Some ranks did not end well; their tracebacks are the message."""


class Died:
    """What a rank that was killed returns."""

    def __repr__(self) -> str:
        return "Died()"


def _rank_main(
    function: Callable[..., Any], rank: int, size: int, store: str, connection: Any, arguments: tuple[Any, ...]
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), RESHARD_THREADS="2")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        result = function(rank, size, *arguments)
        connection.send(("fine", result))
    except unittest.SkipTest as reason:
        connection.send(("skipped", str(reason)))
    except BaseException as error:
        connection.send(("failed", f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        # A rank that leaves early breaks the group under those that still connect to it, so all stay until all have answered.
        try:
            connection.poll(None)
        except OSError:
            pass
        # Nothing to clean up is worth waiting for: a peer may have been killed on purpose. But processes that a trainer or
        # PyTorch saves in would stay for ever.
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(0)


def _answers(
    connections: list[Any], timeout: float, grace: float | None, is_failure: Callable[[Any], bool]
) -> dict[int, tuple[str, Any]]:
    """What ranks say, by rank, as far as they do in time."""
    answers: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(connections):
        waiting = [connection for rank, connection in enumerate(connections) if rank not in answers]
        ready = multiprocessing.connection.wait(waiting, max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        for connection in ready:
            try:
                answer = connection.recv()  # type: ignore[union-attr]
            except EOFError:
                answer = ("died", Died())
            answers[connections.index(connection)] = answer
            if grace is not None and (answer[0] != "fine" or is_failure(answer[1])):
                deadline = min(deadline, time.monotonic() + grace)
    return answers


class Ranks:
    """Runs functions on ranks."""

    def __init__(self, preload: tuple[str, ...] = ()) -> None:
        # The server imports what ranks need once; it has to find the package and the tests.
        tests = os.path.dirname(os.path.abspath(__file__))
        paths = [os.path.dirname(tests), tests, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        self._context = multiprocessing.get_context("forkserver")
        always = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "reshard.torch", "helpers"]
        self._context.set_forkserver_preload([*always, *preload])

    def close(self) -> None:
        """Nothing is left running between tests."""

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = 120,
        may_die: bool = False,
        grace: float | None = None,
        is_failure: Callable[[Any], bool] = lambda result: False,
    ) -> list[Any]:
        """What each rank returned, by rank. Once one has failed, the others, which may wait for it, have `grace` seconds;
        `is_failure` tells it of what a rank returned."""
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            processes, connections = [], []
            for rank in range(size):
                mine, theirs = self._context.Pipe()
                process = self._context.Process(
                    target=_rank_main, args=(function, rank, size, store, theirs, arguments), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(mine)
            answers = _answers(connections, timeout, grace, is_failure)
            results: list[Any] = []
            failures: list[str] = []
            skipped: list[str] = []
            for rank in range(size):
                how, result = answers.get(rank, ("failed", f"rank {rank} did not answer within {timeout} s"))
                results.append(result)
                if how == "failed":
                    failures.append(result)
                elif how == "skipped":
                    skipped.append(result)
                elif how == "died" and not may_die:
                    failures.append(f"rank {rank} died")
            for connection in connections:
                connection.close()
            for process in processes:
                process.join(1.0)
                if process.is_alive():
                    process.kill()
        if failures:
            raise RankFailed("\n".join(failures))
        if skipped:
            raise unittest.SkipTest(skipped[0])
        return results
