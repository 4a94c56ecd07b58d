"""Log-probs by vLLM of a model and of the model with an adapter, in a process of their own.

    python -m tests.learner.support.vllm_scores MODEL ADAPTER TOKENS

TOKENS is a list in JSON; the last line of output is a list of the two.
"""

from __future__ import annotations

import json
import sys

from actors.engine.vllm_options import VllmOptions, prepare_environment


def main() -> None:
    """Load the model once, and score the tokens without and with the adapter."""
    base, adapter, token_ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    prepare_environment(VllmOptions(base, max_model_len=64, in_process=True))
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        base,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        enforce_eager=True,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=2**28,
        enable_lora=True,
        max_lora_rank=8,
    )

    def logprobs(lora: LoRARequest | None) -> list[float]:
        (output,) = llm.generate(
            {"prompt_token_ids": token_ids},
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
            lora_request=lora,
            use_tqdm=False,
        )
        assert output.prompt_logprobs is not None
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [each[token].logprob for token, each in pairs if each is not None]

    print(json.dumps([logprobs(None), logprobs(LoRARequest("trained", 1, adapter))]))


if __name__ == "__main__":
    main()
