# SPDX-License-Identifier: Apache-2.0
"""What every run of vLLM here has in common, undivided or not."""

from __future__ import annotations

MAX_TOKENS = 16
PROMPTS = [[(7 * i * (k + 1) + k) % 500 + 1 for i in range(3 + 5 * k)] for k in range(8)]
#: vLLM 0.32's own RMSNorm for CPUs is wrong where its input has strides, as in MLA: logits then depend on the batch.
COMPILATION = {"custom_ops": ["none"]}
#: vLLM raises max_num_batched_tokens to this for MLA models on a CPU, whatever it was given.
MAX_BATCH_TOKENS = 2048
#: Arguments of `LLM`.
LLM = {
    "dtype": "float32",
    "enforce_eager": True,
    "compilation_config": COMPILATION,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": MAX_BATCH_TOKENS,
}
#: Environment of every process with vLLM.
ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # LLM.apply_model takes a function
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
