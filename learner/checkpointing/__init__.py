"""Checkpoints, resumption, recovery of a rewound store, rollback."""
