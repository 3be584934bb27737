"""Loss scaling from gradient histograms, and running means of micro-batches' gradients."""

from __future__ import annotations

from fp8compile.amp.accumulation import Accumulation, accumulate
from fp8compile.amp.collapse import Limits, LossScaleCollapse
from fp8compile.amp.scaler import LossScaler
from fp8compile.amp.watching import HookObservations, watch

__all__ = ["Accumulation", "HookObservations", "Limits", "LossScaleCollapse", "LossScaler", "accumulate", "watch"]
