"""What the scripts beside this one share: digests of tensors, and ranks as forked processes."""

import hashlib
import os
import socket
import sys
import traceback
from collections.abc import Callable

import torch


def digest(tensor: torch.Tensor) -> dict[str, object]:
    tensor = tensor.detach().cpu().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    name = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(tensor.shape), "sha256": hashlib.sha256(data).hexdigest()}


def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that makes tensors, on the CPU wherever it is asked to."""
    return lambda *args, **kwargs: make(*args, **{k: v for k, v in kwargs.items() if (k, v) != ("device", "cuda")})


def ranks(count: int, work: Callable[[], None]) -> None:
    """Runs something on ranks; the processes that it leaves behind are none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GROUP_RANK="0", TORCHELASTIC_RUN_ID="x")
            code = 0
            try:
                work()
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            os._exit(code)
        pids.append(pid)
    if any([os.waitpid(pid, 0)[1] for pid in pids]):
        sys.exit("a rank failed")
