"""A tiny random Qwen3 model, and versions of its weights staged as the learner would."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.engine.engine import StagedWeights
from broker.protocol.manifest import Probe, TensorSpec, WeightManifest, checksum_of, digest_of
from buffer.record.episode import PolicyVersion

VOCABULARY = 64


def make_model(
    *,
    tied: bool = True,
    layers: int = 2,
    width: int = 64,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=max(1, width // 64),
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
        # Wide enough that another version is another policy, not the same near-uniform one.
        initializer_range=0.15,
    )
    return Qwen3ForCausalLM(config).float().eval()


def perturb(model: Qwen3ForCausalLM, *, seed: int, scale: float = 0.05) -> None:
    """Make another version: move every parameter."""
    generator = torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=model.device)
            parameter.add_(scale * noise)


def stage(
    model: Qwen3ForCausalLM, path: Path, version: PolicyVersion, *, dtype: str = "float32"
) -> StagedWeights:
    """Write the parameters as one flat file (tied ones once) with their manifest.

    A file of that size is written through a mapping, as actors and learner do: never cut off.
    """
    payload = bytearray()
    specs = []
    for name, parameter in model.named_parameters():
        wire = parameter.detach().to("cpu", getattr(torch, dtype)).contiguous()
        raw = wire.view(torch.uint8).numpy().tobytes()
        specs.append(TensorSpec(name, dtype, tuple(wire.shape), len(payload), len(raw)))
        payload += raw
    if not path.exists() or path.stat().st_size != len(payload):
        path.unlink(missing_ok=True)
        path.write_bytes(bytes(len(payload)))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), len(payload)) as memory:
        memory[:] = payload
    manifest = WeightManifest(
        version=version,
        digest=digest_of([payload]),
        checksum=checksum_of(payload),
        num_bytes=len(payload),
        tensors=tuple(specs),
        probe=Probe((), ()),
    )
    return StagedWeights(path, manifest)


@torch.no_grad()
def reference_logprobs(
    model: Qwen3ForCausalLM, token_ids: list[int], *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of tokens 1.., nats, by a plain forward pass. Shape [T - 1]."""
    ids = torch.tensor([token_ids])
    logits = model(ids).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None]).squeeze(-1)
