"""Run by vLLM's own python, which has none of our packages: greedy texts of a target, alone or with the draft of a folder, as one line of json.

`in_vllm.py TARGET CONFIG TOKENIZED TOKENS`: CONFIG is a speculative-config.json or "", TOKENIZED a json list of prompts as ids.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main(target: str, config: str, prompts: str, tokens: str) -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    dtype = json.loads((Path(target) / "config.json").read_text()).get(
        "dtype", "float32"
    )  # left to itself vLLM would make float16 of float32
    asked = json.loads(Path(config).read_text()) if config else None
    engine = LLM(
        model=target, speculative_config=asked, dtype=dtype, max_model_len=512, enforce_eager=True, max_num_seqs=1, seed=0,
        max_num_batched_tokens=1024, gpu_memory_utilization=0.02, disable_log_stats=False, enable_prefix_caching=False,
    )  # fmt: skip
    how = SamplingParams(temperature=0.0, max_tokens=int(tokens), ignore_eos=True, detokenize=False)
    done = engine.generate([{"prompt_token_ids": one} for one in json.loads(prompts)], how, use_tqdm=False)
    counted = {one.name.removeprefix("vllm:spec_decode_num_"): one.value for one in engine.get_metrics() if hasattr(one, "value")}
    found = {"tokens": [list(one.outputs[0].token_ids) for one in done]}
    print(json.dumps(found | {name: counted.get(name, 0) for name in ("drafts", "draft_tokens", "accepted_tokens")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
