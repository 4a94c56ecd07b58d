"""Names of the phases of a batch, in their order; for readers that do not load torch as well."""

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
