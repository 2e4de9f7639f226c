"""Save, load and reshard the state of distributed training.

This module needs neither torch nor, until an array is read, NumPy::

    with reshard.open("ckpt/step-100") as checkpoint:
        checkpoint.keys()
        checkpoint["model.embed.weight"].shape
        checkpoint["model.embed.weight"][10:20, :]

``reshard.torch`` saves and loads what PyTorch trains.
"""

from ._reshard import __version__

# As typing has it, which takes longer to import than all the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._checkpoint import Checkpoint, Chunk, Tensor, latest, open, steps, verify
    from ._errors import (
        AlreadyExists,
        Cancelled,
        Corrupt,
        GroupError,
        Incomplete,
        InternalError,
        InvalidInput,
        Mismatch,
        NoSuchKey,
        NotFound,
        ReshardError,
        ResourceExhausted,
        StorageError,
        UntrustedPickle,
    )
    from ._reports import (
        Before,
        Cast,
        ConvertReport,
        Difference,
        DiffReport,
        DigestEntry,
        EditReport,
        Finding,
        FirstBad,
        HealthFinding,
        HealthReport,
        MergeReport,
        ParamHealth,
        Percentiles,
        PruneReport,
        RecoverReport,
        Slowest,
        TensorStats,
        Trend,
        TrendStep,
        TrendTensor,
        VerifyReport,
        ViewReport,
    )
    from ._tools import convert, diff, digest, edit, health, merge, prune, recover, relayout, stats, trend
    from ._view import View, recipes
    from .torch._switch import Installed, install, installed, uninstall

# What takes a moment to import comes when it is asked for.
_LATER = {
    "_checkpoint": ("Checkpoint", "Chunk", "Tensor", "latest", "open", "steps", "verify"),
    "_errors": (
        "AlreadyExists",
        "Cancelled",
        "Corrupt",
        "GroupError",
        "Incomplete",
        "InternalError",
        "InvalidInput",
        "Mismatch",
        "NoSuchKey",
        "NotFound",
        "ReshardError",
        "ResourceExhausted",
        "StorageError",
        "UntrustedPickle",
    ),
    "_view": ("View", "recipes"),
    "torch._switch": ("Installed", "install", "installed", "uninstall"),
    "_reports": (
        "Before",
        "Cast",
        "ConvertReport",
        "DiffReport",
        "Difference",
        "DigestEntry",
        "EditReport",
        "Finding",
        "FirstBad",
        "HealthFinding",
        "HealthReport",
        "MergeReport",
        "ParamHealth",
        "Percentiles",
        "PruneReport",
        "RecoverReport",
        "Slowest",
        "TensorStats",
        "Trend",
        "TrendStep",
        "TrendTensor",
        "VerifyReport",
        "ViewReport",
    ),
    "_tools": ("convert", "diff", "digest", "edit", "health", "merge", "prune", "recover", "relayout", "stats", "trend"),
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    for module, names in _LATER.items():
        if name in names:
            found: object = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AlreadyExists",
    "Before",
    "Cancelled",
    "Cast",
    "Checkpoint",
    "Chunk",
    "ConvertReport",
    "Corrupt",
    "DiffReport",
    "Difference",
    "DigestEntry",
    "EditReport",
    "Finding",
    "FirstBad",
    "GroupError",
    "HealthFinding",
    "HealthReport",
    "Incomplete",
    "Installed",
    "InternalError",
    "InvalidInput",
    "MergeReport",
    "Mismatch",
    "NoSuchKey",
    "NotFound",
    "ParamHealth",
    "Percentiles",
    "PruneReport",
    "RecoverReport",
    "ReshardError",
    "ResourceExhausted",
    "Slowest",
    "StorageError",
    "Tensor",
    "TensorStats",
    "Trend",
    "TrendStep",
    "TrendTensor",
    "UntrustedPickle",
    "VerifyReport",
    "View",
    "ViewReport",
    "__version__",
    "convert",
    "diff",
    "digest",
    "edit",
    "health",
    "install",
    "installed",
    "latest",
    "merge",
    "open",
    "prune",
    "recipes",
    "recover",
    "relayout",
    "stats",
    "steps",
    "trend",
    "uninstall",
    "verify",
]
