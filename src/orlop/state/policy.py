"""What a load may tolerate: each field relaxes one verdict, and nothing else does.

Must not know how verdicts are found.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoadPolicy", "Options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPolicy:
    """What a load may tolerate; by default nothing.

    Attributes:
        allow_missing: Leaves of the model and parts that the checkpoint lacks keep their live value.
        allow_unexpected: Leaves of the model and optimizers that nothing here takes are ignored.
        cast_dtypes: Values may be cast to a dtype that can't hold them all.
        allow_weights_only: A run may resume from its own checkpoint although that holds no optimizer.
        allow_other_class: State and groups of another optimizer class may be tried.
        merge_uneven: State whose scalars (`step`) differed by rank takes the largest on another topology.
        reset_damaged: FQN patterns (`layers.*`) of parameters whose damaged state is reset to a fresh one.
        skip_parts: Parts (`scheduler`, `rng`, …) that are neither expected nor loaded.
        verify_first: Not a tolerance: in `CheckpointStore.resume` the coordinator compares all checksums before the
            first live value changes, at the price of a second read. Otherwise they are compared as bytes are loaded.
    """

    allow_missing: bool = False
    allow_unexpected: bool = False
    cast_dtypes: bool = False
    allow_weights_only: bool = False
    allow_other_class: bool = False
    merge_uneven: bool = False
    reset_damaged: tuple[str, ...] = ()
    skip_parts: frozenset[str] = frozenset()
    verify_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a load was asked for; see `resume_checkpoint`."""

    load_states: bool
    load_args: bool
    policy: LoadPolicy
    key_prefix: str
    is_auto: bool = False
