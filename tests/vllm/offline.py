# SPDX-License-Identifier: Apache-2.0
"""Generates with vLLM in a process of its own. Imports nothing of this project: the same file runs undivided vLLM.

argv: a JSON file with `model`, `prompts`, `max_tokens`, `llm` (arguments of `LLM`), `report` (whether to ask for
`afd_report`) and `out`, the JSON file that gets `tokens`, `logprobs` (by position: of each of the five most likely
tokens), and for each worker `parameters` (names) and `reports`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def parameter_names(model):
    return [name for name, _ in model.named_parameters()]


def main() -> None:
    from offline import parameter_names  # by a name under which workers find it
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(job["model"], skip_tokenizer_init=True, **job["llm"])
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], logprobs=5, detokenize=False, ignore_eos=True
    )
    outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], sampling)]
    result = {
        "tokens": [list(o.token_ids) for o in outputs],
        "logprobs": [[{t: lp.logprob for t, lp in position.items()} for position in o.logprobs] for o in outputs],
        "parameters": llm.apply_model(parameter_names),
        "reports": llm.collective_rpc("afd_report") if job["report"] else [],
    }
    Path(job["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
