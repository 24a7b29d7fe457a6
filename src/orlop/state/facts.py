"""What was recorded when a checkpoint was saved, against what is live now.

Owns the list of such facts. Must not know what follows from a difference.
"""

from __future__ import annotations

from orlop import compat
from orlop.dcp.layout import describe_meshes
from orlop.state.parts import Live
from orlop.state.report import Fact
from orlop.state.stock import class_name
from orlop.store.manifest import Manifest
from orlop.version import __version__

__all__ = ["compare_facts"]


def compare_facts(live: Live, manifest: Manifest | None) -> tuple[Fact, ...]:
    """World size, mesh, versions and optimizer classes; recorded ones are None where there is no manifest."""
    meshes = _meshes(describe_meshes(live.model.parameters()))
    facts = [
        (
            "world size",
            str(manifest.world_size) if manifest is not None else None,
            str(live.ranks.world_size),
        ),
        ("mesh", _meshes(manifest.meshes) if manifest is not None else None, meshes),
        ("torch", manifest.torch_version if manifest is not None else None, compat.torch_version()),
        ("orlop", manifest.orlop_version if manifest is not None else None, __version__),
    ]
    for label, optimizer in live.optimizers.items():
        recorded = manifest.optimizer_classes.get(label) if manifest is not None else None
        facts.append((f"class of {label}", recorded, class_name(optimizer)))
    return tuple(Fact(name=name, recorded=recorded, live=now) for name, recorded, now in facts)


def _meshes(meshes: list[str]) -> str:
    return "; ".join(meshes) or "none"
