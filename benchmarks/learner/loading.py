"""Memory of a host while the learner's ranks load a model: `python -m benchmarks.learner.loading`.

Two ranks, as processes, load a Qwen3 of 85 million parameters that was saved in bfloat16: each its
part of it (`parts`), or each all of it and then its part (`whole`, as before). What counts is the
memory of both ranks together that no file backs, at its peak, in models of float32. JSON on stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.support.machine import REPOSITORY, describe_machine
from configs.settings import LearnerSettings, RunSettings, Settings
from learner.assembly import load_policy
from learner.model.policy import Policy, shard
from learner.model.ranks import join
from learner.model.rendezvous import RENDEZVOUS_FILE
from learner.model.saved_model import load_causal_lm

RANKS = 2
TIMEOUT_S = 600
LOOK_EVERY_S = 0.002
SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def main() -> None:
    """Run one rank, or both arms."""
    if len(sys.argv) > 1:
        _load(sys.argv[1], Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).bfloat16()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(folder)
        del model
        peaks = {arm: _peak(arm, folder) / (4 * parameters) for arm in ("whole", "parts")}
    figures = {
        "parameters": parameters,
        "models_at_peak": {arm: round(peak, 3) for arm, peak in peaks.items()},
        "ratios": {"load_memory_fewer": round(peaks["whole"] / peaks["parts"], 3)},
        "machine": describe_machine(),
    }
    print(json.dumps(figures))


def _peak(arm: str, folder: str) -> int:
    """Bytes of all ranks, each at its peak."""
    with tempfile.TemporaryDirectory() as meeting:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.learner.loading", arm, folder],
                stdout=subprocess.PIPE,
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "WORLD_SIZE": str(RANKS),
                    "RANK": str(rank),
                    RENDEZVOUS_FILE: f"{meeting}/ranks",
                },
            )
            for rank in range(RANKS)
        ]
        try:
            outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    return sum(json.loads(output.splitlines()[-1]) for output in outputs)


def _load(arm: str, folder: Path) -> None:
    """Load as one rank of two, and print how far it grew meanwhile."""
    ranks = join("cpu", threads=1)
    run = RunSettings(model=str(folder), environment="calculator", dtype="float32")
    settings = Settings(run=run, learner=LearnerSettings(ranks=RANKS))
    before = _anonymous_bytes()
    peak, is_done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(LOOK_EVERY_S):
            peak = max(peak, _anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    if arm == "parts":
        policy = load_policy(settings, ranks)
    else:
        policy = shard(
            Policy(load_causal_lm(folder), temperature=1.0), ranks.mesh, dtype=torch.float32
        )
    is_done.set()
    watcher.join()
    assert next(policy.parameters()).device.type == "cpu"
    print(peak - before)
    ranks.destroy_process_group()


def _anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(text.split("RssAnon:")[1].split()[0])


if __name__ == "__main__":
    main()
