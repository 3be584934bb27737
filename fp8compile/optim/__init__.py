"""Optimizers whose states take 2 bytes per parameter, and updates fused into one generated kernel for all shapes."""

from fp8compile.optim.base import EncodedOptimizer
from fp8compile.optim.compress import compress, decompress
from fp8compile.optim.optimizers import LAMB, SGD, Adam, AdamW, Lion, Muon, RMSprop
from fp8compile.optim.overrides import override
from fp8compile.optim.stable_embedding import StableEmbedding

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "EncodedOptimizer",
    "Lion",
    "Muon",
    "RMSprop",
    "StableEmbedding",
    "compress",
    "decompress",
    "override",
]
