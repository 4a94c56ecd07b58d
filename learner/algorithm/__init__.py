"""Mathematics of the policy-gradient loss: functions of tensors and settings."""
