"""`verify --deep`: every leaf is loaded as a resume would load it, and the saved fingerprint is compared.

Needs torch. Must not know how records are checked without it (`check`).
"""

from __future__ import annotations

import os

from orlop.tools.findings import Finding
from orlop.tools.fingerprints import stored_fingerprint
from orlop.tools.opened import Opened

__all__ = ["check_deep"]


def check_deep(path: str | os.PathLike[str]) -> list[Finding]:
    """Load every leaf, and compare the fingerprint that was saved, if one was.

    Args:
        path: A checkpoint that `check` found sound.
    """
    findings: list[Finding] = []
    found = stored_fingerprint(path, findings).leaves
    manifest = Opened(path).manifest
    saved = {} if manifest is None or manifest.fingerprint is None else manifest.fingerprint
    failed = {finding.where.split(" in ")[0] for finding in findings}
    for leaf, digest in saved.items():
        if leaf not in failed and found.get(leaf) != digest:
            what = "its values are not those that were fingerprinted when it was saved"
            findings.append(
                Finding(
                    kind="fingerprint", where=leaf, what=what, expected=digest, found=str(found.get(leaf))
                )
            )
    return findings
