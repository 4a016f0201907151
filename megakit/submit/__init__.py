"""From a recipe to a job of a cluster's scheduler: python -m megakit.submit."""
