"""Hydra's configuration root: recipe/NAME.yaml describes a run end to end, the other folders are the parts it is made of."""
