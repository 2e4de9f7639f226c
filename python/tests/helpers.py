"""States to save and ways to compare them, used by tests in this process and on ranks."""

from __future__ import annotations

import inspect
import io

import torch
import torch.distributed.checkpoint as dcp

#: What makes PyTorch save and load in one process; before 2.6 it did so by itself.
ALONE = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}

DTYPES = [
    name
    for name in (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
        "int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex32 complex64 complex128"
    ).split()
    if hasattr(torch, name)
]


def _torch_stores(name):
    """Whether torch's own files can have a dtype: 2.5 makes tensors of some that it can neither save nor load."""
    buffer = io.BytesIO()
    try:
        torch.save(torch.zeros(2, dtype=torch.uint8).to(getattr(torch, name)), buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception:
        return False
    return True


DTYPES_OF_TORCH = [name for name in DTYPES if _torch_stores(name)]


def random_bytes(shape, dtype, seed=0):
    """A tensor of any dtype with random bits; bools are proper ones."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def bits(tensor):
    """The content of a tensor, whatever its dtype, comparable bit for bit."""
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def same(a, b):
    """Bit for bit, dtype and shape included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def zeroed(tree):
    """The same structure, with tensors of other content and values of another value."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: zeroed(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [zeroed(value) for value in tree] if _opened(tree) else ["another"]
    return "another"


def _opened(values):
    return any(isinstance(v, (torch.Tensor, dict)) or (isinstance(v, list) and _opened(v)) for v in values)


def assert_same_tree(a, b, at="state"):
    """Equal containers, values with their types, and tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), f"{at}: {type(b)}"
        assert same(a, b), f"{at} differs"
    elif isinstance(a, dict):
        assert list(map(str, a)) == list(map(str, b)), f"{at}: keys {list(a)} and {list(b)}"
        for (key, x), y in zip(a.items(), b.values()):
            assert_same_tree(x, y, f"{at}.{key}")
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b), f"{at}: {a!r} and {b!r}"
        for index, (x, y) in enumerate(zip(a, b)):
            assert_same_tree(x, y, f"{at}.{index}")
    elif isinstance(a, float) and a != a:
        assert isinstance(b, float) and b != b
    else:
        assert type(a) is type(b) and a == b, f"{at}: {a!r} and {b!r}"


def global_tensor(shape, dtype=torch.float32, seed=0):
    """The tensor that every rank agrees on before it is sharded."""
    return random_bytes(shape, dtype, seed)


class Scaled(torch.Tensor):
    """A wrapper as quantization libraries make them: its content is in other tensors."""

    @staticmethod
    def __new__(cls, whole, scale):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32)

    def __init__(self, whole, scale):
        self.whole, self.scale = whole, scale

    def __repr__(self):
        return f"Scaled({self.whole}, {self.scale})"

    def __tensor_flatten__(self):
        return ["whole", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["whole"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale)
        if func is torch.ops.aten.copy_.default:
            args[0].whole.copy_(args[1].whole)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        if func is torch.ops.aten.view.default:
            return cls(args[0].whole.view(args[1]), args[0].scale)
        raise NotImplementedError(func)
