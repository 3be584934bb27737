"""Encoders, and encoders with decoders, of transformers: masked bytes, or the second half of a window from the first."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.hugging_face import (
    CONTINUED,
    FFN,
    HEADS,
    LAYERS,
    LENGTH,
    MASKED,
    SIZES,
    WIDTH,
    hugging_face,
    masked,
)
from benchmarks.zoo.registry import ZooModel

POSITIONS = {"max_position_embeddings": 2 * LENGTH + 2}
OF_ROBERTA: dict[str, Any] = {**SIZES, **POSITIONS}
OF_T5: dict[str, Any] = {
    "vocab_size": SIZES["vocab_size"],
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": FFN,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
OF_BART: dict[str, Any] = {
    "vocab_size": SIZES["vocab_size"],
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": FFN,
    "decoder_ffn_dim": FFN,
    "max_position_embeddings": 2 * LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
    "use_cache": False,
}
OF_DEBERTA: dict[str, Any] = {
    **SIZES,
    "relative_attention": True,
    "max_relative_positions": 32,
    "position_buckets": 16,
    "pos_att_type": ["p2c", "c2p"],
    "type_vocab_size": 0,
    "share_att_key": True,
}
OF_LED: dict[str, Any] = {
    **{k: v for k, v in OF_BART.items() if k != "max_position_embeddings"},
    "max_encoder_position_embeddings": 2 * LENGTH,
    "max_decoder_position_embeddings": 2 * LENGTH,
    "attention_window": 16,
}


def continued(name: str, prefix: str, model: str = "ForConditionalGeneration", **sizes: Any) -> ZooModel:
    """An encoder and a decoder."""
    return hugging_face(name, f"{prefix}Config", f"{prefix}{model}", CONTINUED, **sizes)


MODELS: tuple[ZooModel, ...] = (
    masked("bert", "Bert", **SIZES),
    masked("roberta", "Roberta", **OF_ROBERTA),
    masked("xlm_roberta", "XLMRoberta", **OF_ROBERTA),
    masked("camembert", "Camembert", **OF_ROBERTA),
    masked("albert", "Albert", **SIZES, embedding_size=64),
    masked("electra", "Electra", **SIZES, embedding_size=64),
    masked(
        "distilbert",
        "DistilBert",
        vocab_size=SIZES["vocab_size"],
        dim=WIDTH,
        hidden_dim=FFN,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_position_embeddings=2 * LENGTH,
    ),
    masked("deberta_v2", "DebertaV2", **OF_DEBERTA),
    masked("mpnet", "MPNet", **OF_ROBERTA),
    masked("convbert", "ConvBert", **SIZES, embedding_size=64),
    masked("mobilebert", "MobileBert", **SIZES, embedding_size=64, intra_bottleneck_size=64, true_hidden_size=64),
    masked("squeezebert", "SqueezeBert", **SIZES, embedding_size=WIDTH),
    masked("fnet", "FNet", **{k: v for k, v in SIZES.items() if k != "num_attention_heads"}),
    masked("longformer", "Longformer", **OF_ROBERTA, attention_window=16),
    masked("roformer", "RoFormer", **SIZES, embedding_size=WIDTH),
    masked("modernbert", "ModernBert", **SIZES, cls_token_id=0, sep_token_id=0, local_attention=16),
    hugging_face(
        "funnel",
        "FunnelConfig",
        "FunnelForMaskedLM",
        MASKED,
        vocab_size=SIZES["vocab_size"],
        block_sizes=[1, 1],
        num_decoder_layers=1,
        d_model=WIDTH,
        n_head=HEADS,
        d_head=WIDTH // HEADS,
        d_inner=FFN,
        initializer_std=0.02,
    ),
    continued("t5", "T5", **OF_T5),
    continued("t5_gated", "T5", **OF_T5, feed_forward_proj="gated-gelu"),
    continued("mt5", "MT5", **OF_T5, initializer_factor=0.1),
    continued("longt5", "LongT5", **OF_T5, local_radius=15),
    continued("bart", "Bart", **OF_BART),
    continued("mbart", "MBart", **OF_BART),
    continued("pegasus", "Pegasus", **OF_BART),
    continued("blenderbot", "Blenderbot", **OF_BART),
    continued("marian", "Marian", "MTModel", **OF_BART),
    continued("m2m_100", "M2M100", **OF_BART),
    continued("led", "LED", **OF_LED),
)
