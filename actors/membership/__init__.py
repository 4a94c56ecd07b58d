"""Membership of this actor in weight groups: steered here, joined where its weights are used."""
