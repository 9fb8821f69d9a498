"""The configuration tree that Hydra composes. See config.yaml."""
