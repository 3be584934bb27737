"""Language models of transformers that predict the next byte: 2 layers, 128 wide, 4 x 64 bytes."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.hugging_face import (
    CAUSAL,
    FFN,
    GROUPED,
    HEADS,
    LAYERS,
    LENGTH,
    SIZES,
    WIDTH,
    causal,
    hugging_face,
)
from benchmarks.zoo.registry import ZooModel

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
OLDER: dict[str, Any] = {**SIZES, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2 * LENGTH}
OF_GPT2: dict[str, Any] = {
    k: v for k, v in OLDER.items() if k in ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")
} | {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": False,
}
HEAD_SIZE: dict[str, Any] = {"head_dim": WIDTH // HEADS}
OF_NEO: dict[str, Any] = {
    "vocab_size": SIZES["vocab_size"],
    "hidden_size": WIDTH,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "max_position_embeddings": 2 * LENGTH,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": False,
}
OF_XGLM: dict[str, Any] = {
    "vocab_size": SIZES["vocab_size"],
    "d_model": WIDTH,
    "ffn_dim": FFN,
    "num_layers": LAYERS,
    "attention_heads": HEADS,
    "max_position_embeddings": 2 * LENGTH,
    "use_cache": False,
}
OF_MAMBA: dict[str, Any] = {
    name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "use_cache")
}
OF_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

MODELS: tuple[ZooModel, ...] = (
    causal("llama", "Llama", **GROUPED),
    causal("mistral", "Mistral", **GROUPED),
    causal("mixtral", "Mixtral", **GROUPED, num_local_experts=4, num_experts_per_tok=2),
    causal("qwen2", "Qwen2", **GROUPED),
    causal(
        "qwen2_moe", "Qwen2Moe", **GROUPED, **EXPERTS, moe_intermediate_size=64, shared_expert_intermediate_size=64
    ),
    causal("qwen3", "Qwen3", **GROUPED, **HEAD_SIZE),
    causal("qwen3_moe", "Qwen3Moe", **GROUPED, **HEAD_SIZE, **EXPERTS, moe_intermediate_size=64),
    causal("gemma", "Gemma", **GROUPED, **HEAD_SIZE),
    causal("gemma2", "Gemma2", **GROUPED, **HEAD_SIZE, sliding_window=32),
    hugging_face(
        "gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", CAUSAL, **GROUPED, **HEAD_SIZE, sliding_window=32
    ),
    causal("phi", "Phi", **SIZES),
    causal("phi3", "Phi3", **GROUPED),
    hugging_face("gpt2", "GPT2Config", "GPT2LMHeadModel", CAUSAL, **OF_GPT2),
    causal("gpt_neo", "GPTNeo", **OF_NEO),
    causal("gpt_neox", "GPTNeoX", **SIZES),
    causal("gptj", "GPTJ", **OF_GPT2, rotary_dim=16),
    causal("gpt_bigcode", "GPTBigCode", **OF_GPT2),
    causal("opt", "OPT", **SIZES, ffn_dim=FFN, word_embed_proj_dim=WIDTH, do_layer_norm_before=True),
    causal("bloom", "Bloom", **SIZES, n_layer=LAYERS, n_head=HEADS),
    causal("falcon", "Falcon", **SIZES),
    causal(
        "mpt",
        "Mpt",
        vocab_size=SIZES["vocab_size"],
        d_model=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_seq_len=2 * LENGTH,
    ),
    causal("codegen", "CodeGen", **OF_GPT2, rotary_dim=16),
    causal("stablelm", "StableLm", **GROUPED),
    causal("olmo", "Olmo", **GROUPED),
    causal("olmo2", "Olmo2", **GROUPED),
    causal("olmoe", "Olmoe", **GROUPED, **EXPERTS),
    causal("cohere", "Cohere", **GROUPED),
    causal("starcoder2", "Starcoder2", **GROUPED),
    causal("granite", "Granite", **GROUPED),
    causal("glm", "Glm", **GROUPED, **HEAD_SIZE),
    causal("nemotron", "Nemotron", **GROUPED),
    causal("smollm3", "SmolLM3", **GROUPED),
    causal("xglm", "XGLM", **OF_XGLM),
    causal("deepseek_v3", "DeepseekV3", **SIZES, num_key_value_heads=HEADS, **OF_DEEPSEEK),
    causal("mamba", "Mamba", **OF_MAMBA, state_size=8),
    causal("mamba2", "Mamba2", **OF_MAMBA, state_size=16, num_heads=8, head_dim=32, n_groups=1, chunk_size=32),
    causal("rwkv", "Rwkv", **OF_MAMBA, attention_hidden_size=WIDTH, context_length=2 * LENGTH),
    causal("recurrent_gemma", "RecurrentGemma", **GROUPED, **HEAD_SIZE, lru_width=WIDTH, attention_window_size=32),
)
