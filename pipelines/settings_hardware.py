"""Settings of hardware: what XID codes mean at a site, where well-kept tools contradict one another.

The catalogue and its disputes stand in `features/xids.py`; which codes are faults follows from both.
"""

from __future__ import annotations

from pydantic import Field, field_validator

from features.xids import Action, Xid, overridden
from pipelines.settings_reading import Section


class XidSettings(Section):
    """What a site says of one code; what is not given stays as in the catalogue."""

    action: Action | None = Field(None, description="What to do at once.")
    is_fatal: bool | None = Field(None, description="The GPU does no work until somebody has acted: a hardware fault.")
    meaning: str | None = Field(None, min_length=1, description="In words.")


class HardwareSettings(Section):
    """What hardware says and what it means."""

    xid: dict[str, XidSettings] = Field(
        {},
        description='What XID codes mean here, as { "63" = { action = "reset_gpu", is_fatal = true } }; '
        "what is not given: NVIDIA's catalogue.",
    )

    @field_validator("xid")
    @classmethod
    def _codes(cls, xid: dict[str, XidSettings]) -> dict[str, XidSettings]:
        for code in xid:
            if not code.isdecimal() or not 0 < int(code) <= 10_000 or code != str(int(code)):
                raise ValueError(f"{code!r} is no XID code: a whole number from 1 to 10000, as '63'")
        return xid

    def table(self) -> dict[int, Xid]:
        """The catalogue with the site's word."""
        return overridden({int(code): said.model_dump(exclude_none=True) for code, said in self.xid.items()})

    def is_fatal(self, word: bool) -> tuple[int, ...]:
        """Codes that the site says to be fatal, or not to be."""
        return tuple(int(code) for code, said in self.xid.items() if said.is_fatal is word)
