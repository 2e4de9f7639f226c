"""PyTorch's own tests with reshard in place of what they test.

PyTorch's wheels come without its tests, and they are not ours to keep: fetch a source tree of PyTorch and name files of it. Every file
runs once as it is and once in each mode; what passes with PyTorch and not with reshard is listed. Tests that ask for accelerators run
on the CPU with gloo; those that cannot do so fail with PyTorch as well and do not count.

    cd python/tests && python -m pytorch_suite --source ~/pytorch --mode calls test/distributed/checkpoint/test_state_dict.py

Modes: ``storage`` (PyTorch's calls over `StorageReader` and `StorageWriter`), ``calls`` (`reshard.install()`), ``state`` (FSDP's own
calls for optimizer state, by ours).
"""
