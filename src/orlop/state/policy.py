"""What a load may tolerate: each field relaxes one verdict, and nothing else does.

Must not know how verdicts are found.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from types import NoneType

from orlop.arguments import frozen_names, require_flags, require_kind

__all__ = ["OWN_PARTS", "LoadPolicy", "Options", "require_options"]

# The parts that have a name of orlop's own. A policy may skip them wherever it is used, whether or not they are there.
OWN_PARTS = frozenset({"data", "progress", "rng", "scheduler"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPolicy:
    """What a load may tolerate; by default nothing.

    Attributes:
        allow_missing: Leaves of the model and parts that the checkpoint lacks keep their live value.
        allow_unexpected: Leaves and parts that nothing here takes are ignored.
        cast_dtypes: Values may be cast to a dtype that can't hold them all.
        allow_weights_only: A run may resume from its own checkpoint although that holds no optimizer.
        allow_other_class: State and groups of another optimizer class may be tried.
        merge_uneven: State whose scalars (`step`) differed by rank takes the largest on another topology.
        reset_damaged: FQN patterns (`layers.*`) of parameters whose damaged state is reset to a fresh one; a collection
            of strings, kept as a tuple.
        allow_other_ranks: Parts that each rank has its own of (random streams, a data position), saved by another
            number of ranks, start afresh; on the same number they are loaded.
        skip_parts: Parts (`scheduler`, `rng`, …) that are neither expected nor loaded; kept as a frozenset. A name that
            neither the engine nor the checkpoint has is refused.
        verify_first: Not a tolerance: in `CheckpointStore.resume` the coordinator compares all checksums before the
            first live value changes, at the price of a second read. Otherwise they are compared as bytes are loaded.

    Raises:
        TypeError: A tolerance is not True or False, or a string stands where a collection of strings is meant.
    """

    allow_missing: bool = False
    allow_unexpected: bool = False
    cast_dtypes: bool = False
    allow_weights_only: bool = False
    allow_other_class: bool = False
    merge_uneven: bool = False
    allow_other_ranks: bool = False
    reset_damaged: tuple[str, ...] = ()
    skip_parts: frozenset[str] = frozenset()
    verify_first: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reset_damaged", frozen_names("reset_damaged", self.reset_damaged))
        object.__setattr__(self, "skip_parts", frozenset(frozen_names("skip_parts", self.skip_parts)))
        flags = (each.name for each in fields(self) if each.name not in ("reset_damaged", "skip_parts"))
        require_flags(**{name: getattr(self, name) for name in flags})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a load was asked for; see `resume_checkpoint`."""

    load_states: bool
    load_args: bool
    policy: LoadPolicy
    key_prefix: str
    is_auto: bool = False

    def plain(self) -> dict[str, object]:
        """Every option by name, such that equal ones read alike: sets have no order of their own."""
        values = {**asdict(self), **asdict(self.policy)}
        del values["policy"]
        return {name: sorted(v) if isinstance(v, frozenset) else v for name, v in values.items()}


def require_options(*, policy: object, **flags: object) -> None:
    """Raise TypeError for what a load can't be asked for."""
    require_kind("policy", policy, (LoadPolicy, NoneType), "a LoadPolicy", "orlop.LoadPolicy(...)")
    require_flags(**flags)
