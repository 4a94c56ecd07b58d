"""Trained tokens per second and per CPU second: the whole ring beside TRL's synchronous GRPO.

Same model, prompts, batch, length and reward; all arms in turns.

    ring, ring_vllm     one actor with the small engine, which suits so small a model, and with vLLM
    trl, trl_2_threads  TRL with transformers' generation, by threads
    trl_twice           two processes of TRL at once, with a thread each

Where two processors are threads of one core, each does less in a second while the other computes:
those of the ring always do, TRL's one thread never does. `trl_twice` over `trl` says how much less.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.ring.trl.process import run_trl, trl_is_missing
from benchmarks.ring.watched_run import Figures, measure_ring, together
from benchmarks.support.progress import Say
from benchmarks.support.workload import THROUGHPUT, Workload, make_model, write_prompts

NUM_PROMPTS = 512
RINGS = {"ring": "torch", "ring_vllm": "vllm"}
"""Arm -> engine of its actor."""
TRLS = {"trl": (1,), "trl_2_threads": (2,), "trl_twice": (1, 1)}
"""Arm -> threads of each of its processes."""


def beside_trl(
    folder: Path, *, rounds: int, batches: int, steps: int, say: Say
) -> dict[str, Figures]:
    """Measure all arms, `rounds` times; figures are medians, with the rates of each round."""
    missing = trl_is_missing()
    if missing:
        say(f"trl: skipped; {missing}")
    found: dict[str, list[Figures]] = {}
    for index in range(rounds):
        for arm, engine in RINGS.items():
            overrides = (*THROUGHPUT, f"actors.engine={engine}")
            workload = Workload(f"{arm}-{index}", "demo.yaml", folder, overrides)
            found.setdefault(arm, []).append(measure_ring(workload, batches))
            say(f"{arm}: {found[arm][-1]}")
        for arm, threads in {} if missing else TRLS.items():
            found.setdefault(arm, []).append(_trl(folder, threads, steps))
            say(f"{arm}: {found[arm][-1]}")
    arms = {arm: together(runs) for arm, runs in found.items()}
    return arms | ({"trl": {"skipped": missing}} if missing else {})


def _trl(folder: Path, threads: tuple[int, ...], steps: int) -> Figures:
    """Run TRL in a process for each number of threads, all of them at once."""
    workload = Workload("ring", "demo.yaml", folder, THROUGHPUT)
    model, prompts = make_model(workload), write_prompts(workload, NUM_PROMPTS)

    def run(number: int) -> Figures:
        return run_trl(
            folder / f"trl-{number}.log",
            model=model,
            prompts=prompts,
            steps=steps,
            threads=threads[number],
            lr=1e-9,
        )

    with ThreadPoolExecutor(len(threads)) as pool:
        runs = list(pool.map(run, range(len(threads))))
    return {
        "tokens_per_cpu_s": round(statistics.mean(ran["tokens_per_cpu_s"] for ran in runs), 1),
        "tokens_per_s": round(sum(ran["tokens_per_s"] for ran in runs), 1),
    }


def limit_of_vllm(ring: Figures, bare: Figures, trl: Figures) -> float | None:
    """Return what the ring's ratio per CPU second would be if its actor cost no more than vLLM.

    Args:
        ring: With an actor of vLLM.
        bare: `LLMEngine.step()` alone, with the requests of the same workload.
        trl: The other side of the ratio.
    """
    if not all("tokens_per_cpu_s" in arm for arm in (ring, bare, trl)):
        return None
    cpu_ms: dict[str, float] = ring["cpu_ms_per_batch"]
    all_s = sum(cpu_ms.values()) / 1e3
    tokens = all_s * ring["tokens_per_cpu_s"]
    least_s = all_s - cpu_ms["actors"] / 1e3 + tokens / bare["tokens_per_cpu_s"]
    return round(float(tokens / least_s / trl["tokens_per_cpu_s"]), 3)
