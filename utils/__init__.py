"""Parts that anyone can use without the trainer: they need torch and NumPy only."""

if __name__ == "utils":  # imported at a checkout's root as plain `utils`: hand out the very same modules, not copies
    import importlib
    import pkgutil
    import sys

    sys.modules["utils"] = ours = importlib.import_module("safe_trainer.utils")
    for module in pkgutil.iter_modules(ours.__path__):
        sys.modules[f"utils.{module.name}"] = importlib.import_module(f"safe_trainer.utils.{module.name}")
