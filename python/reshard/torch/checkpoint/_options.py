"""What the drop-in module does where PyTorch leaves no choice: PyTorch's behaviour by default, ours where asked for."""

from __future__ import annotations

import dataclasses

from ..._errors import InvalidInput
from ..._types import CastPolicy, VerifyPolicy
from .._group import DEFAULT_TIMEOUT


@dataclasses.dataclass
class Options:
    """How calls under PyTorch's names behave. The defaults are what a program written for PyTorch expects.

    Attributes:
        overwrite: replace a checkpoint that is there, as PyTorch does; the old one stays readable until the new one is complete.
        strict: also refuse stored keys that nobody asks for, inside the top-level entries of which something is wanted.
        cast: where element types differ: "any" as in PyTorch, "widening" or "never".
        allow_pickle: unpickle values whose classes the program has not declared safe with ``torch.serialization.add_safe_globals``.
            Loading such a value executes code from the file.
        verify: compare checksums "never", of records that are read "whole", or "always".
        checksums: compute and store checksums.
        timeout: seconds to wait for other ranks.
    """

    overwrite: bool = True
    strict: bool = False
    cast: CastPolicy = "any"
    allow_pickle: bool = False
    verify: VerifyPolicy = "whole"
    checksums: bool = True
    timeout: float = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises where a choice is none."""
        for name, allowed in (("cast", ("never", "widening", "any")), ("verify", ("never", "whole", "always"))):
            if getattr(self, name) not in allowed:
                raise InvalidInput(f"{name} is one of {', '.join(map(repr, allowed))}, not {getattr(self, name)!r}")


#: The choices of this process; ``reshard.install(...)`` sets them, and a program may.
options = Options()
