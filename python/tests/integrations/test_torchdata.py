"""torchdata's StatefulDataLoader in a Checkpointer: each rank's own position, and a policy for other numbers of ranks."""

import pytest
import torch

pytest.importorskip("torchdata")
import reshard
import reshard.torch as rt


def run(rank, size, root, steps, policy):
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = list(range(100 * rank, 100 * rank + 40))
    loader = StatefulDataLoader(data, batch_size=4, num_workers=0)
    ckpt = rt.Checkpointer(root, model=torch.nn.Linear(2, 2), loader=loader, loader_on_resize=policy, signals=())
    try:
        start = ckpt.restore()
    except reshard.Mismatch as error:
        return str(error)
    taken = [batch.tolist() for _, batch in zip(range(steps), loader)]
    ckpt.save(start + steps - 1)
    ckpt.close()
    return start, taken


def test_every_rank_goes_on_where_it_was(tmp_path, ranks):
    root = str(tmp_path / "run")
    first, second = ranks(2, run, root, 3, "error"), ranks(2, run, root, 2, "error")
    for rank in range(2):
        batches = [list(range(100 * rank + at, 100 * rank + at + 4)) for at in range(0, 20, 4)]
        assert first[rank] == (0, batches[:3]) and second[rank] == (3, batches[3:])
    assert "is content of each rank; 2 ranks saved it, and 3 load it" in ranks(3, run, root, 1, "error")[0]
    assert ranks(3, run, root, 1, "drop")[2] == (5, [[200, 201, 202, 203]])
