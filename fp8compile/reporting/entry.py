"""What every entry of a report has in common: the tensor that it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fp8compile.fx.provenance import Origin, TensorInfo

E = TypeVar("E", bound="Entry")


@dataclass(frozen=True)
class Entry:
    """What a pass reports of a tensor."""

    info: TensorInfo

    @property
    def name(self) -> str:
        """The name of the tensor's node."""
        return self.info.name

    @property
    def origin(self) -> Origin:
        """The operation, module and source line that it comes from."""
        return self.info.origin

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Its shape; a symbolic size is text."""
        return self.info.shape

    @property
    def dtype(self) -> str:
        """Its dtype as short text, "bf16"."""
        return self.info.dtype

    def moved(self: E, place: str) -> E:
        """The same entry with a module path that begins at ``place``."""
        module = ".".join(part for part in (place, self.origin.module) if part)
        return dataclasses.replace(
            self, info=dataclasses.replace(self.info, origin=dataclasses.replace(self.origin, module=module))
        )

    @classmethod
    def from_dict(cls: type[E], data: Mapping[str, Any]) -> E:
        """The inverse of ``dataclasses.asdict``, also after a trip through JSON."""
        fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in data.items()}
        return cls(**fields | {"info": TensorInfo.from_dict(data["info"])})
