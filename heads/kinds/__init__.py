"""The kinds of acceptance heads, one a file: what it reads, its form, and how it is asked fast.

`heads.config.KINDS` names them and says how each is trained. A saved head carries its kind's file.
"""

from heads.kinds.confidence import ConfidenceHead
from heads.kinds.immediate import ImmediateHead
from heads.kinds.specdecpp import AcceptanceHead

__all__ = ["AcceptanceHead", "ConfidenceHead", "ImmediateHead"]
