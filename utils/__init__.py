"""Parts that anyone can use without the trainer: they need torch and NumPy only."""

if __name__ == "utils":  # imported at a checkout's root as plain `utils`: hand out the very same modules, not copies
    import sys

    import safe_trainer.utils
    import safe_trainer.utils.anomaly
    import safe_trainer.utils.monitors

    sys.modules["utils"] = safe_trainer.utils
    sys.modules["utils.anomaly"] = safe_trainer.utils.anomaly
    sys.modules["utils.monitors"] = safe_trainer.utils.monitors
