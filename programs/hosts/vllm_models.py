"""Tiny models of several kinds for tests in vLLM, and what vLLM says of those that it cannot run on a CPU."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

VOCABULARY = 512
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
}


def write_model(folder: Path, seed: int = 0, **changes: Any) -> str:
    """Write a Llama of 400,000 random parameters: with these its tokens depend on every layer. Return where it is."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        **changes,
    }
    config = LlamaConfig(**settings)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    described = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(described))
    return str(folder)


def write_config(folder: Path, kind: str) -> str:
    """Write the configuration of a model, whose weights are to be drawn by vLLM; return where it is."""
    import transformers

    # A latent of the one size that vLLM's kernels for CPUs know.
    mla = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": None}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64}
    deepseek = {**SIZES, **mla, **experts, "num_key_value_heads": 4, "first_k_dense_replace": 2}
    deepseek |= {"n_group": 1, "topk_group": 1}
    hybrid = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1}
    configs: dict[str, tuple[str, str, dict[str, Any]]] = {
        "mla": ("DeepseekV2ForCausalLM", "DeepseekV2Config", deepseek),
        "sparse": ("DeepseekV32ForCausalLM", "DeepseekV3Config", {**deepseek, "q_lora_rank": 64}),
        "windows": (
            "Gemma2ForCausalLM",
            "Gemma2Config",
            {**SIZES, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 256, "query_pre_attn_scalar": 32},
        ),
        "states": (
            "MambaForCausalLM",
            "MambaConfig",
            {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 16},
        ),
        "hybrid": ("JambaForCausalLM", "JambaConfig", {**SIZES, **hybrid, "num_key_value_heads": 2}),
        "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "num_key_value_heads": 2, "head_dim": 32}),
    }
    architecture, name, settings = configs[kind]
    made = getattr(transformers, name)(**settings).to_dict()
    if kind == "sparse":
        made |= {"model_type": "deepseek_v32", "index_topk": 64, "index_head_dim": 128, "index_n_heads": 4}
    folder.mkdir(exist_ok=True)
    described = {**made, "architectures": [architecture], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(described, default=str))
    return str(folder)


def said(pipe: Any, model: str, config: dict[str, Any] | None, settings: dict[str, Any], log: str) -> None:
    """Run a prompt in an engine of a process of its own, and send what its error says, "" where there is none."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from vllm import LLM, SamplingParams

    options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 1024, "load_format": "dummy"}
    options |= {"kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 8, "disable_log_stats": True, **settings}
    sampling = SamplingParams(temperature=0, max_tokens=2, detokenize=False, ignore_eos=True)
    try:
        llm = LLM(model, kv_transfer_config=config, **options)
        llm.generate({"prompt_token_ids": list(range(200))}, sampling, use_tqdm=False)
        pipe.send("")
    except Exception:
        pipe.send(traceback.format_exc())
    sys.stdout.flush()
