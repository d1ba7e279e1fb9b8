"""What a journal says of itself: whether a block that it does not name can be there all the same."""

from __future__ import annotations

from skymemory.index.journal import Record, RecordOp


class Standing:
    """``complete``: the journal began with its constellation and nothing of it was lost since, so absence is known.

    A journal that begins without BORN was made for a constellation that may have held values already: its index was
    deleted, or others write there from another computer. Nothing makes it complete again: however much was probed,
    somebody whose records are elsewhere may have stored more.
    """

    __slots__ = ("complete", "keys_probed", "unknown_records", "values_adopted")

    def __init__(self, complete: bool = False) -> None:
        self.complete = complete
        self.keys_probed = 0
        self.values_adopted = 0
        self.unknown_records = 0
        """Records of a later release: what they say of blocks is not known here."""

    def apply(self, record: Record) -> None:
        """What a record says of its journal; those about blocks say nothing."""
        if record.op is RecordOp.BORN:
            self.complete = True
        elif record.op is RecordOp.LOST:
            self.complete = False
        elif record.op is RecordOp.UNKNOWN:
            self.complete = False
            self.unknown_records += 1
        elif record.op is RecordOp.PROBED:
            self.keys_probed += record.probed[0]
            self.values_adopted += record.probed[1]
