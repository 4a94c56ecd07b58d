"""States of a rank's random number generators: that of the CPU, then that of its GPU."""

from __future__ import annotations

import torch


def random_state(device: torch.device) -> bytes:
    """Encode the states."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states).numpy().tobytes()


def restore_random_state(encoded: bytes, device: torch.device) -> None:
    """Restore what `random_state` encoded; the CPU's alone where the device is another kind."""
    both = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    size = torch.get_rng_state().numel()
    torch.set_rng_state(both[:size])
    if device.type == "cuda" and len(both) > size:
        torch.cuda.set_rng_state(both[size:], device)
