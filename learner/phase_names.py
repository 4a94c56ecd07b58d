"""Names of the phases of a batch, in their order; also for the console, which loads no torch."""

PHASES: tuple[str, ...] = (
    "wait",
    "fetch",
    "pack",
    "gather",
    "prepare",
    "forward",
    "backward",
    "clip",
    "optimizer",
    "checkpoint",
    "other",
)
