"""What must be built in Python for a recipe: models, data sets, tasks. Needs torch; knows nothing of the trainer."""
